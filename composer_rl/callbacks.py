"""What happens beside the training loop: metrics.jsonl, completions/, held-out evaluation and the progress bar."""

import json
import math
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from composer_rl.heldout import HeldoutEvaluation, HeldoutScore
from composer_rl.trainer import ComposerTrainer


class MetricsFile:
    """metrics.jsonl: one JSON object per line with `step` and the metrics; a value that is not finite is null."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Append one line."""
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in values.items()
        }
        with open(self.path, "a") as file:
            file.write(json.dumps({"step": step, **finite}, allow_nan=False) + "\n")


class MetricsCallback(TrainerCallback):
    """Writes each logged training step to metrics.jsonl."""

    def __init__(self, metrics: MetricsFile) -> None:
        self.metrics = metrics

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # The last log of a run holds totals of the whole run, which summary.json has.
        if state.is_world_process_zero and "train_runtime" not in kwargs["logs"]:
            self.metrics.write(state.global_step, kwargs["logs"])


class CompletionsCallback(TrainerCallback):
    """Writes the rollouts of every logged generation to completions/step-NNNNNN.jsonl, turns and tool results whole."""

    def __init__(self, trainer: ComposerTrainer, folder: Path) -> None:
        self.trainer = trainer
        self.folder = folder
        self.written = 0

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not state.is_world_process_zero or self.trainer.generations == self.written:
            return
        self.written = self.trainer.generations
        self.folder.mkdir(exist_ok=True)
        logs: dict[str, Any] = self.trainer._logs
        with open(self.folder / f"step-{state.global_step:06d}.jsonl", "w") as file:
            for row, (prompt, completion, advantage) in enumerate(
                zip(logs["prompt"], logs["completion"], logs["advantages"], strict=True)
            ):
                rewards = {
                    name: None if math.isnan(values[row]) else values[row] for name, values in logs["rewards"].items()
                }
                # JSON escapes keep lone surrogates, which a sampled byte sequence can decode to.
                file.write(
                    json.dumps({"prompt": prompt, "completion": completion, "rewards": rewards, "advantage": advantage})
                    + "\n"
                )


class HeldoutCallback(TrainerCallback):
    """Scores the policy on the held-out prompts before, every `every` steps (0 = never) and after training."""

    def __init__(
        self, trainer: ComposerTrainer, evaluation: HeldoutEvaluation, metrics: MetricsFile, every: int
    ) -> None:
        self.trainer = trainer
        self.evaluation = evaluation
        self.metrics = metrics
        self.every = every
        self.scores: dict[int, HeldoutScore] = {}
        self.seconds = 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._evaluate(state)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.every and state.global_step % self.every == 0:
            self._evaluate(state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step not in self.scores:
            self._evaluate(state)

    def _evaluate(self, state: TrainerState) -> None:
        start = time.perf_counter()
        score = self.evaluation(self.trainer)
        seconds = time.perf_counter() - start
        self.seconds += seconds
        self.scores[state.global_step] = score
        if state.is_world_process_zero:
            self.metrics.write(
                state.global_step,
                {
                    "heldout/score": score.mean,
                    "heldout/standard_error": score.standard_error,
                    "heldout/tool_error_share": score.tool_error_share,
                    "heldout/n": score.n,
                    "heldout/seconds": seconds,
                },
            )


class ProgressCallback(TrainerCallback):
    """A progress bar with reward, held-out score and time left; without a terminal, a line per held-out score."""

    def __init__(self, heldout: HeldoutCallback, console: Console) -> None:
        self.heldout = heldout
        self.console = console
        self.reward = math.nan
        self.reported: int | None = None
        self.progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("reward {task.fields[reward]:.3f}  held-out {task.fields[heldout]:.3f}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self.task: TaskID | None = None
        self.start = time.perf_counter()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.start = time.perf_counter()
        self.progress.start()
        self.task = self.progress.add_task("training", total=state.max_steps, reward=math.nan, heldout=math.nan)
        self._show(state)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # With several updates per generation only the first one's log row has a reward.
        self.reward = kwargs["logs"].get("reward", self.reward)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._show(state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._show(state)
        self.progress.stop()

    def _show(self, state: TrainerState) -> None:
        step = max(self.heldout.scores)
        score = self.heldout.scores[step].mean
        if self.task is not None:
            self.progress.update(self.task, completed=state.global_step, reward=self.reward, heldout=score)
        if not self.console.is_terminal and self.reported != step:
            self.reported = step
            elapsed = time.perf_counter() - self.start
            left = elapsed / state.global_step * (state.max_steps - state.global_step) if state.global_step else 0.0
            reward = "" if math.isnan(self.reward) else f"  reward {self.reward:.3f}"
            self.console.print(
                f"step {state.global_step}/{state.max_steps}{reward}"
                f"  held-out {score:.3f}  {elapsed:.0f} s gone, {left:.0f} s left"
            )
