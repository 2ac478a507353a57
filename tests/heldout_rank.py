"""A toy GRPO run with tools and held-out evaluation, small enough to repeat; as a program, one rank of it."""

import json
import os
import random
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AddedToken, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template

from composer_rl.heldout import HeldoutEvaluation, HeldoutScore

WALL_TIME = re.compile("time|per_second")
ERROR = r"^\{'error': "

CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>' + (call.function or call) | tojson + '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""


def call(place: str) -> str:
    return f'<tool_call>{{"name": "look", "arguments": {{"place": "{place}"}}}}</tool_call>'


class Room:
    """Has a box with a key in it and an attic that is locked."""

    def reset(self, **row: Any) -> None:
        self.row = row

    def look(self, place: str) -> str:
        """Look into a place.

        Args:
            place: Where to look.
        """
        if place == "attic":
            raise ValueError("locked")
        return "key"


class ChanceRoom(Room):
    """Answers by Python's random and numpy's."""

    def look(self, place: str) -> str:
        """Look into a place.

        Args:
            place: Where to look.
        """
        return random.choice(("red", "blue", "green")) + " " + np.random.choice(("red", "blue", "green"))


class MoodyRoom(ChanceRoom):
    """Answers also by its own past, which outlives a rollout."""

    def __init__(self) -> None:
        self.looks = 0

    def look(self, place: str) -> str:
        """Look into a place.

        Args:
            place: Where to look.
        """
        self.looks += 1
        return super().look(place) + " red" * (self.looks % 3)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Words, with a whole tool call as one token, so that random weights call the tool now and then."""
    words = ["<unk>", "red", "blue", "green", "user", "assistant", "key", "locked"]
    vocabulary = {word: index for index, word in enumerate(words)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.decoder = decoders.Fuse()
    core.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    core.add_tokens([AddedToken(text, normalized=False) for text in ("\n", call("box"), call("attic"))])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>", unk_token="<unk>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.response_template = qwen3_template
    return tokenizer


def make_policy(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=256,
            initializer_range=0.2,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
        )
    )


def red(completions: list[list[dict[str, Any]]], log_metric: Callable[..., None], **_: Any) -> list[float]:
    """Training reward: how often the rollout says red; it logs a metric, as reward functions may."""
    counts = [float(sum(m["content"].count("red") for m in completion)) for completion in completions]
    log_metric("red", sum(counts))
    return counts


class Gold:
    """Held-out reward: the row's answer; keeps what it scored by row name."""

    def __init__(self) -> None:
        self.seen: dict[str, list[dict[str, Any]]] = {}

    def __call__(self, completions: list[Any], name: list[str], answer: list[float], **_: Any) -> list[float]:
        self.seen |= dict(zip(name, completions, strict=True))
        return answer


def make_rows(count: int, prompt: str = "red") -> list[dict[str, Any]]:
    """Rows whose prompts differ in length; the answer of the last is 1, of the others 0."""
    return [
        {
            "prompt": [{"role": "user", "content": " ".join([prompt] * (number + 1))}],
            "name": f"{prompt} {number}",
            "answer": float(number == count - 1),
        }
        for number in range(count)
    ]


def make_trainer(folder: Path, environment: type = Room, reward_funcs: Any = (red,), **overrides: Any) -> GRPOTrainer:
    """8 rollouts per generation over all ranks and two updates from each, so that old log-probs are used."""
    tokenizer = make_tokenizer()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    arguments = {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 4 // ranks,
        "steps_per_generation": 2,
        "num_generations": 4,
        "max_completion_length": 64,
        "max_tool_calling_iterations": 3,
        "beta": 0.0,
        **overrides,
    }
    return GRPOTrainer(
        make_policy(tokenizer),
        reward_funcs=list(reward_funcs),
        args=GRPOConfig(**arguments),
        train_dataset=Dataset.from_list(make_rows(8, "blue")),
        processing_class=tokenizer,
        environment_factory=environment,
    )


class EvaluateEveryStep(TrainerCallback):
    def __init__(self, trainer: GRPOTrainer, evaluation: HeldoutEvaluation) -> None:
        self.trainer, self.evaluation = trainer, evaluation
        self.scores: list[HeldoutScore] = []

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.scores.append(self.evaluation(self.trainer))

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.scores.append(self.evaluation(self.trainer))


@dataclass(frozen=True)
class Run:
    logs: list[dict[str, float]]
    weights: dict[str, torch.Tensor]
    scores: list[HeldoutScore]


def train(folder: Path, evaluate: bool) -> Run:
    """A whole training, with or without an evaluation before it and after every step."""
    trainer = make_trainer(folder, MoodyRoom)
    evaluation = HeldoutEvaluation(make_rows(5), red, ERROR, seed=3, batch_size=2)
    callback = EvaluateEveryStep(trainer, evaluation)
    if evaluate:
        trainer.add_callback(callback)
    trainer.train()
    logs = [{k: v for k, v in row.items() if not WALL_TIME.search(k)} for row in trainer.state.log_history]
    return Run(logs, trainer.accelerator.unwrap_model(trainer.model).state_dict(), callback.scores)


def same_training(one: Run, other: Run) -> bool:
    """Whether two trainings agree bit by bit, in every logged number and every weight."""
    return one.logs == other.logs and all(map(torch.equal, one.weights.values(), other.weights.values()))


def evaluate(
    trainer: GRPOTrainer, rows: list[dict[str, Any]], batch_size: int, seed: int = 3
) -> tuple[HeldoutScore, dict[str, list[dict[str, Any]]]]:
    """The score, and the completions that this rank saw by row name."""
    gold = Gold()
    score = HeldoutEvaluation(rows, gold, ERROR, seed=seed, batch_size=batch_size)(trainer)
    return score, gold.seen


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    score, seen = evaluate(make_trainer(folder), make_rows(11), batch_size=2)
    exact, _ = evaluate(make_trainer(folder), make_rows(5), batch_size=2)
    result = {
        "seen": seen,
        "score": asdict(score),
        "exact": asdict(exact),
        "same_training": same_training(train(folder, evaluate=False), train(folder, evaluate=True)),
    }
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(result))
    # Torch's own teardown of two ranks sometimes aborts after all is done.
    sys.stdout.flush()
    os._exit(0)
