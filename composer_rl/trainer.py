"""ComposerTrainer: TRL's GRPOTrainer, with each override saying which TRL method it replaces and why."""

import re
import time
from typing import Any

import torch
from transformers import PreTrainedModel
from trl import GRPOTrainer

from composer_rl.rollout import read_rollout


class ComposerTrainer(GRPOTrainer):
    """GRPOTrainer that also measures where the time goes and how many rollouts met a tool error.

    Args beyond GRPOTrainer's:
        error_pattern: regular expression that marks a tool result as an error; None = no such metric.
    """

    # Set by Trainer.__init__, which declares it optional.
    model: PreTrainedModel

    def __init__(self, *args: Any, error_pattern: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.error_pattern = re.compile(error_pattern) if error_pattern is not None else None
        # Wall seconds of training generations so far; evaluation is not in them.
        self.seconds = {"generate": 0.0, "score": 0.0}
        # Generations sampled for training so far, so that a log can tell new rollouts from reused ones.
        self.generations = 0

    def _generate(self, prompts: list) -> Any:
        """Replace GRPOTrainer._generate to time it."""
        start = time.perf_counter()
        output = super()._generate(prompts)
        if self.model.training:
            self.seconds["generate"] += time.perf_counter() - start
        return output

    def _calculate_rewards(
        self, inputs: list, prompts: list, completions: list, completion_ids_list: list
    ) -> torch.Tensor:
        """Replace GRPOTrainer._calculate_rewards to time it and to log the share of rollouts with a tool error."""
        start = time.perf_counter()
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        if self.model.training:
            self.seconds["score"] += time.perf_counter() - start
            self.generations += 1
            if self.error_pattern is not None:
                errors = [
                    float(bool(read_rollout(completion, self.error_pattern).tool_errors)) for completion in completions
                ]
                share = self.accelerator.gather(torch.tensor(errors, device=self.accelerator.device)).mean()
                self._metrics["train"]["tools/error_share"].append(share.item())
        return rewards
