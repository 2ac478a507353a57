"""The signals compose: a term's strength depends on nothing but its weight, and what is off leaves no trace.

The one seam: `recorded_generation` stands in for GRPOTrainer._generate and returns rollouts recorded once from a real
trainer's tool loop, because live generation differs between ranks by design. All else is the trainer's own.
As a program, one rank of the two-rank laws: RANK and WORLD_SIZE in the environment, the folder as argument.
"""

import copy
import inspect
import json
import math
import os
import re
import socket
import subprocess
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from datasets import Dataset
from test_replay import RAGGED
from test_sdpo import ERROR_PATTERN, RULES, shared_tokenizer, tiny_policy
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import composer_rl.trainer
from composer_rl.channels.replay import ReplayChannel, ReplayConfig
from composer_rl.channels.sdpo import FACTS, ColumnHints
from composer_rl.rollout import ErrorTurn, find_error_turns
from composer_rl.task.shop import Shop, exact_total, make_rows
from composer_rl.trainer import ComposerReplicationTrainer, ComposerTrainer

GROUP = 4
COPIES = 24
ROWS = [row | {"hint": ""} for row in make_rows(8, seed=5, split="train")]
# Rollouts with an error turn in each group: two groups are a generation, and a rank's share of it on two ranks.
UNEVEN = (1, 3)
ERRORS = (*UNEVEN, *(2, 0), *(0, 2), *(0, 0))
NO_ERRORS = (0,) * 8

# Weights that make every signal's part of the gradient a good part of the whole.
ALPHA, BETA, COEF = 0.5, 0.2, 0.1
PAIRS_PER_UPDATE = 5
SIGNALS = {"sdpo": ("sdpo",), "replay": ("replay",), "kl": ("kl",), "all": ("sdpo", "replay", "kl")}
TERMS = ("loss/grpo", "loss/sdpo_kl", "loss/trace_replay_dpo", "loss/total", "loss/alpha_sdpo", "loss/beta_replay")
# Metrics whose value must not depend on the layout.
OURS = ("loss/", "sdpo/", "replay/", "kl_reward/", "reward", "tools/")


# --- recorded rollouts ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recorded:
    """What GRPOTrainer._generate returned for one rollout."""

    prompt_ids: list[int]
    completion_ids: list[int]
    tool_mask: list[int]
    completion: list[dict[str, Any]]

    @property
    def error_turns(self) -> list[ErrorTurn]:
        return find_error_turns(self.completion, self.tool_mask, re.compile(ERROR_PATTERN))[0]

    def cut(self) -> "Recorded":
        """The same rollout without its end of turn, which is how TRL tells a truncated one."""
        return Recorded(self.prompt_ids, self.completion_ids[:-1], self.tool_mask[:-1], self.completion)


# Rollouts by the question they answer.
Rollouts = dict[str, list[Recorded]]


def question(row: dict[str, Any]) -> str:
    return row["prompt"][-1]["content"]


def record(folder: Path) -> Rollouts:
    """Different rollouts of every row, from TRL's tool loop at its fixed seed; each ends by itself."""
    trainer = make_trainer(folder, kind=GRPOTrainer, per_device_train_batch_size=COPIES * len(ROWS))
    trainer.num_generations = COPIES
    generate = trainer._generate
    made: list[Any] = []

    def kept(prompts: list[Any]) -> Any:
        made.append(generate(prompts))
        return made[-1]

    trainer._generate = kept
    trainer.model.train()
    trainer._generate_and_score_completions([dict(row) for row in ROWS for _ in range(COPIES)])
    rollouts: Rollouts = defaultdict(list)
    end = shared_tokenizer().eos_token_id
    for number, parts in enumerate(zip(*made[0][:4], strict=True)):
        rollout = Recorded(*parts)
        others = rollouts[question(ROWS[number // COPIES])]
        if rollout.completion_ids[-1] == end and rollout.completion_ids not in [r.completion_ids for r in others]:
            others.append(rollout)
    return rollouts


def scene(pool: Rollouts, errors: Iterable[int] = ERRORS) -> Rollouts:
    """One group per row, of which the first `errors` rollouts have an error turn and the others none."""
    chosen = {}
    for row, count in zip(ROWS, errors, strict=True):
        erred = [rollout for rollout in pool[question(row)] if rollout.error_turns]
        sound = [rollout for rollout in pool[question(row)] if not rollout.error_turns]
        chosen[question(row)] = erred[:count] + sound[: GROUP - count]
        assert len(chosen[question(row)]) == GROUP, "the recording has too few different rollouts"
    return chosen


def recorded_generation(rollouts: Rollouts) -> Callable[..., Any]:
    """A GRPOTrainer._generate that returns what was recorded, by question and place in the group."""

    def generate(self: GRPOTrainer, prompts: list[Any]) -> Any:
        first = self.accelerator.process_index * len(prompts)
        chosen = [
            copy.deepcopy(rollouts[prompt[-1]["content"]][place % GROUP]) for place, prompt in enumerate(prompts, first)
        ]
        parts = zip(*((r.prompt_ids, r.completion_ids, r.tool_mask, r.completion) for r in chosen), strict=True)
        return *map(list, parts), None, {}, None, []

    return generate


# --- a training that keeps what it saw -----------------------------------------------------------------------------


def by_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward with spread that follows from the sampled tokens alone."""
    return [sum(ids) % 5 / 4 for ids in completion_ids]


def constant(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that leaves the policy term nothing to learn."""
    return [0.5] * len(completion_ids)


@cache
def noise(shape: torch.Size) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def move(policy: Any) -> None:
    """Take the policy some way from where it started, which is its reference and its teacher."""
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.dim() == 2:
                parameter += 0.2 * parameter.std() * noise(parameter.shape)


def pairs_of(folder: Path) -> ReplayChannel:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(pair) + "\n" for pair in RAGGED))
    config = ReplayConfig(batch_size=PAIRS_PER_UPDATE)
    return ReplayChannel.from_file(path, shared_tokenizer(), config, seed=0, max_length=512)


def make_trainer(
    folder: Path,
    signals: Iterable[str] = (),
    *,
    kind: Any = ComposerTrainer,
    reward: Any = by_tokens,
    channels: dict[str, Any] | None = None,
    **arguments: Any,
) -> Any:
    """A trainer of the shop with these signals on; `channels` are more of ComposerTrainer's own arguments."""
    own: dict[str, Any] = {}
    if kind is ComposerTrainer:
        own["error_pattern"] = ERROR_PATTERN
    if "sdpo" in signals:
        own |= {"alpha_sdpo": ALPHA, "hints": RULES}
    if "replay" in signals:
        own |= {"beta_replay": BETA, "replay": pairs_of(folder)}
    if "kl" in signals:
        own["kl_in_reward"] = True
        arguments = {"beta": COEF} | arguments
    folder.mkdir(parents=True, exist_ok=True)
    defaults = {
        "loss_type": "dr_grpo",
        "scale_rewards": "none",
        "beta": 0.0,
        "per_device_train_batch_size": 8,
        "num_generations": GROUP,
        "max_completion_length": 128,
        "max_tool_calling_iterations": 3,
        "max_steps": 1,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        # The gradient is compared, not what clipping leaves of it.
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "gradient_checkpointing": False,
    }
    trainer = kind(
        model=tiny_policy(),
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=str(folder),
            use_cpu=True,
            bf16=False,
            shuffle_dataset=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            **defaults | arguments,
        ),
        train_dataset=Dataset.from_list(ROWS),
        processing_class=copy.deepcopy(shared_tokenizer()),
        environment_factory=Shop,
        **own | (channels or {}),
    )
    if "replay" in signals:
        trainer.replay.prepare(trainer, folder / "reference.safetensors")
    move(trainer.model)
    return trainer


@dataclass
class Step:
    """An optimizer step: its gradient in one piece, the losses of its micro-batches, and the metrics it appended."""

    gradient: torch.Tensor
    losses: list[float]
    metrics: dict[str, list[float]] = field(default_factory=dict)


class Watch(TrainerCallback):
    """Keeps the steps of a training, and the inputs of every micro-batch."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.steps: list[Step] = []
        self.losses: list[float] = []
        self.inputs: list[dict[str, Any]] = []
        compute = trainer._compute_loss

        def watched(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
            loss: torch.Tensor = compute(model, inputs)
            assert loss.requires_grad
            self.losses.append(loss.item())
            self.inputs.append(inputs)
            return loss

        trainer._compute_loss = watched
        trainer.add_callback(self)

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
        self.steps.append(Step(torch.cat([g.flatten() for g in gradients]), self.losses))
        self.losses = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.steps[-1].metrics = {name: list(values) for name, values in self.trainer._metrics["train"].items()}


def train(trainer: Any, rollouts: Rollouts | None = None) -> Watch:
    """Run a training on recorded rollouts, or on live ones."""
    watch = Watch(trainer)
    if rollouts is None:
        trainer.train()
    else:
        with mock.patch.object(GRPOTrainer, "_generate", recorded_generation(rollouts)):
            trainer.train()
    return watch


def tokens_of(batch: dict[str, Any]) -> list[tuple[int, ...]]:
    """Prompt and completion of each row of a batch, without the padding."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1).bool()
    return [tuple(row[kept].tolist()) for row, kept in zip(ids, mask, strict=True)]


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one - other).norm() / other.norm()).item()


def same_bits(one: list[Step], other: list[Step]) -> bool:
    return len(one) == len(other) > 0 and all(
        a.losses == b.losses and torch.equal(a.gradient, b.gradient) for a, b in zip(one, other, strict=True)
    )


def ours(metrics: dict[str, list[float]]) -> dict[str, list[float]]:
    """The values of the metrics that a layout must not change."""
    return {name: values for name, values in metrics.items() if name.startswith(OURS)}


def near(metrics: dict[str, list[float]]) -> Any:
    """These values up to float32's rounding, which is 1e-6 in a log-prob summed over a sequence."""
    return {
        name: pytest.approx(values, rel=1e-5, abs=1e-5 if "ratio" in name else 1e-7, nan_ok=True)
        for name, values in ours(metrics).items()
    }


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Rollouts:
    return record(tmp_path_factory.mktemp("recording"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, pool: Rollouts) -> Callable[..., Watch]:
    """Trainings of the whole scene on one rank, each run once: (signals, rollouts per micro-batch, steps)."""

    @cache
    def trained(signals: tuple[str, ...], micro_batch: int = 8, steps: int = 1) -> Watch:
        schedule = {"per_device_train_batch_size": micro_batch, "gradient_accumulation_steps": 8 // micro_batch}
        folder = tmp_path_factory.mktemp("run")
        return train(make_trainer(folder, signals, max_steps=steps, **schedule), scene(pool))

    return trained


# --- two ranks -----------------------------------------------------------------------------------------------------


def rank_program(folder: Path) -> dict[str, Any]:
    """What one of two ranks does and keeps, law by law."""
    rank = os.environ["RANK"]
    stored = json.loads((folder / "rollouts.json").read_text())
    pool = {key: [Recorded(**rollout) for rollout in rollouts] for key, rollouts in stored.items()}
    kept: dict[str, Any] = {}

    def keep(name: str, trainer: Any, rollouts: Rollouts | None) -> None:
        kept[name] = [asdict(step) for step in train(trainer, rollouts).steps]

    schedule = {"per_device_train_batch_size": 4}
    for name, signals in SIGNALS.items():
        # Only error turns change from step to step.
        steps = 4 if "sdpo" in signals else 1
        keep(name, make_trainer(folder / rank / name, signals, max_steps=steps, **schedule), scene(pool))

    checkpointing = make_trainer(
        folder / rank / "checkpointed", SIGNALS["all"], gradient_checkpointing=True, **schedule
    )
    keep("checkpointed", checkpointing, scene(pool))

    masking = make_trainer(folder / rank / "masked", ("sdpo", "replay"), mask_truncated_completions=True, **schedule)
    keep("masked", masking, first_group_cut(scene(pool)))

    # The policy calls tools by itself; on rank 1 it cannot.
    opening = shared_tokenizer().convert_tokens_to_ids("<tool_call>")
    generation = {"suppress_tokens": [opening]} if rank == "1" else {}
    live = make_trainer(folder / rank / "live", SIGNALS["all"], generation_kwargs=generation, **schedule)
    keep("live", live, None)
    # TRL's log has the rollouts of both ranks, in order.
    kept["tool calls"] = [sum("tool_calls" in m for m in completion) for completion in live._logs["completion"]]
    return kept


def first_group_cut(rollouts: Rollouts) -> Rollouts:
    """All rollouts of the first group truncated: with masking, nothing is left of a rank's share."""
    first = question(ROWS[0])
    return rollouts | {first: [rollout.cut() for rollout in rollouts[first]]}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory, pool: Rollouts) -> list[dict[str, Any]]:
    """What each of two gloo ranks kept; a rank that waits for the other without end fails here."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "rollouts.json").write_text(json.dumps({key: [asdict(r) for r in pool[key]] for key in pool}))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in ("0", "1"):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_PORT": str(port)}
        environment = {**os.environ, **place, "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        ranks.append(subprocess.Popen([sys.executable, __file__, str(folder)], env=environment))
    try:
        assert [process.wait(timeout=120) for process in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
    return [torch.load(folder / f"rank{rank}.pt") for rank in (0, 1)]


# --- what is off leaves no trace -----------------------------------------------------------------------------------

OBJECTIVES = {
    "one update per generation": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
    "off-policy, KL in the loss": {
        "loss_type": "dapo",
        "scale_rewards": "group",
        "beta": 0.04,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
        "optim": "adamw_torch",
    },
}


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_with_everything_off_or_at_weight_0_loss_and_gradient_are_grpo_trainers_bit_by_bit(
    tmp_path: Path, pool: Rollouts, objective: str
) -> None:
    arguments = {"max_steps": 2, **OBJECTIVES[objective]}
    at_zero = {"alpha_sdpo": 0.0, "hints": RULES, "beta_replay": 0.0, "replay": pairs_of(tmp_path)}
    grpo = train(make_trainer(tmp_path, kind=GRPOTrainer, **arguments), scene(pool))
    assert len(grpo.steps) == 2 and all(step.gradient.norm() > 0 for step in grpo.steps)
    for channels in ({}, at_zero):
        composer = train(make_trainer(tmp_path, channels=channels, **arguments), scene(pool))
        assert same_bits(composer.steps, grpo.steps)
        assert not any(name.startswith(("sdpo/", "replay/", "kl_reward/")) for name in composer.steps[0].metrics)
        for step in composer.steps:
            assert [step.metrics[name] for name in TERMS[1:3]] == [[0.0], [0.0]]
            assert step.metrics["loss/grpo"] == step.metrics["loss/total"] == pytest.approx([sum(step.losses)])


def test_weight_0_beside_another_channel_equals_the_channel_absent(
    tmp_path: Path, pool: Rollouts, run: Callable[..., Watch]
) -> None:
    pairs = {"beta_replay": 0.0, "replay": pairs_of(tmp_path)}
    assert same_bits(train(make_trainer(tmp_path, ("sdpo",), channels=pairs), scene(pool)).steps, run(("sdpo",)).steps)
    hints = {"alpha_sdpo": 0.0, "hints": RULES}
    replay = train(make_trainer(tmp_path, ("replay",), channels=hints), scene(pool))
    assert same_bits(replay.steps, run(("replay",)).steps)


# --- a signal's strength -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signals", SIGNALS)
def test_every_signal_moves_the_gradient_far_more_than_the_laws_tolerate(
    run: Callable[..., Watch], signals: str
) -> None:
    assert difference(run(SIGNALS[signals]).steps[0].gradient, run(()).steps[0].gradient) > 0.05


@pytest.mark.parametrize("signals", SIGNALS)
def test_gradient_and_metrics_are_those_of_one_micro_batch_in_any_accumulation(
    run: Callable[..., Watch], signals: str
) -> None:
    """TRL shuffles rows into other micro-batches; a gradient is a sum over rows, so their order is no part of it."""
    whole = run(SIGNALS[signals]).steps[0]
    for micro_batch in (2, 1):
        (step,) = run(SIGNALS[signals], micro_batch).steps
        assert len(step.losses) == 8 // micro_batch
        assert difference(step.gradient, whole.gradient) < 1e-5
        assert ours(step.metrics) == near(whole.metrics)


@pytest.mark.parametrize("signals", SIGNALS)
def test_gradient_and_metrics_on_two_ranks_are_those_of_one(
    run: Callable[..., Watch], two_ranks: list[dict[str, Any]], signals: str
) -> None:
    """At one update per generation, with one and three eligible rollouts on the ranks, then 2 and 0, 0 and 2, none."""
    steps = run(SIGNALS[signals], steps=len(two_ranks[0][signals])).steps
    if "sdpo" in SIGNALS[signals]:
        assert [step.metrics["sdpo/eligible_rows"] for step in steps] == [[4.0], [2.0], [2.0], [0.0]]
    for number, step in enumerate(steps):
        ranks = [Step(**rank[signals][number]) for rank in two_ranks]
        # DDP averaged the gradient: ranks that forward past it would drift apart.
        assert torch.equal(ranks[0].gradient, ranks[1].gradient)
        assert difference(ranks[0].gradient, step.gradient) < 1e-5
        for rank in ranks:
            assert ours(rank.metrics) == near(step.metrics)


def test_gradient_checkpointing_on_two_ranks_changes_nothing(
    run: Callable[..., Watch], two_ranks: list[dict[str, Any]]
) -> None:
    one, other = (Step(**rank["checkpointed"][0]) for rank in two_ranks)
    assert torch.equal(one.gradient, other.gradient)
    assert difference(one.gradient, run(SIGNALS["all"]).steps[0].gradient) < 1e-5


def test_padding_by_other_rows_changes_no_channels_gradient_and_no_shaped_advantage(
    tmp_path: Path, pool: Rollouts
) -> None:
    """Padding on the left and on the right, from a group that has no part in the channel."""
    first, second = question(ROWS[0]), question(ROWS[1])
    short = scene(pool, (3, 0, *NO_ERRORS[2:]))
    long = short | {
        second: [
            Recorded(
                r.prompt_ids[:1] * 30 + r.prompt_ids, r.completion_ids + [9] * 80, r.tool_mask + [0] * 80, r.completion
            )
            for r in short[second]
        ]
    }
    seen = []
    for number, rollouts in enumerate((short, long)):
        # A constant reward leaves the channels alone in the gradient.
        channels = train(make_trainer(tmp_path / f"{number}", ("sdpo", "replay"), reward=constant), rollouts)
        kl = train(make_trainer(tmp_path / f"{number}", ("kl",), reward=constant), rollouts)
        (batch,) = kl.inputs
        by_row = dict(zip(tokens_of(batch), batch["advantages"].tolist(), strict=True))
        advantages = torch.tensor([by_row[(*r.prompt_ids, *r.completion_ids)] for r in short[first]])
        lengths = batch["prompt_ids"].shape[1], batch["completion_ids"].shape[1]
        seen.append((channels.steps[0].gradient, advantages, lengths))
    (gradient, advantages, lengths), (padded, padded_advantages, padded_lengths) = seen
    assert all(padded - length >= 20 for length, padded in zip(lengths, padded_lengths, strict=True))
    assert gradient.norm() > 0.01 and difference(padded, gradient) < 1e-5
    assert advantages.abs().max() > 1e-3 and difference(padded_advantages, advantages) < 1e-5


# --- ranks whose data differ ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("signals", SIGNALS)
def test_both_ranks_log_the_same_whoever_has_error_turns(two_ranks: list[dict[str, Any]], signals: str) -> None:
    """Error turns on rank 0 alone, on rank 1 alone, on neither: that the ranks ended at all is the fixture's."""
    for one, other in zip(two_ranks[0][signals], two_ranks[1][signals], strict=True):
        assert one["metrics"].keys() == other["metrics"].keys()


def test_a_rank_whose_rollouts_call_no_tool_ends_with_the_other(two_ranks: list[dict[str, Any]]) -> None:
    calls = two_ranks[0]["tool calls"]
    assert sum(calls[:4]) > 0 and sum(calls[4:]) == 0
    for one, other in zip(two_ranks[0]["live"], two_ranks[1]["live"], strict=True):
        assert one["metrics"].keys() == other["metrics"].keys() > set(TERMS)
        assert ours(one["metrics"]) == near(other["metrics"])
        assert torch.equal(one["gradient"], other["gradient"]) and one["gradient"].isfinite().all()


def test_a_rank_whose_rows_are_all_masked_takes_part_without_weight(
    tmp_path: Path, pool: Rollouts, two_ranks: list[dict[str, Any]]
) -> None:
    one, other = (Step(**rank["masked"][0]) for rank in two_ranks)
    trainer = make_trainer(tmp_path, ("sdpo", "replay"), mask_truncated_completions=True)
    (alone,) = train(trainer, first_group_cut(scene(pool))).steps
    assert one.metrics["sdpo/excluded/truncated"] == [1.0] and one.metrics["sdpo/eligible_rows"] == [3.0]
    assert torch.equal(one.gradient, other.gradient)
    assert difference(one.gradient, alone.gradient) < 1e-5
    assert one.metrics.keys() == other.metrics.keys()


# --- nothing left --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("errors", [NO_ERRORS, ERRORS], ids=["no error turn", "error turns, all masked"])
@pytest.mark.parametrize("signals", [(), ("sdpo",), ("sdpo", "replay")], ids=["none", "sdpo", "sdpo and replay"])
def test_all_rows_masked_leave_a_finite_zero_on_the_graph(
    tmp_path: Path, pool: Rollouts, signals: tuple[str, ...], errors: tuple[int, ...]
) -> None:
    """Watch asserts that the loss has a graph; the pairs, which no rollout masks, go on by themselves."""
    cut = {key: [rollout.cut() for rollout in group] for key, group in scene(pool, errors).items()}
    schedule = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    masked = train(make_trainer(tmp_path, signals, mask_truncated_completions=True, **schedule), cut)
    assert all(not inputs["completion_mask"].any() for inputs in masked.inputs)
    (step,) = masked.steps
    assert step.metrics["loss/grpo"] == step.metrics["loss/sdpo_kl"] == [0.0]
    if "replay" in signals:
        unscored = train(make_trainer(tmp_path, ("replay",), reward=constant, **schedule), scene(pool))
        assert difference(step.gradient, unscored.steps[0].gradient) < 1e-5
    else:
        assert step.losses == [0.0, 0.0] and not step.gradient.any()


def test_rows_without_a_token_of_the_model_leave_a_finite_zero_under_kl(tmp_path: Path, pool: Rollouts) -> None:
    """Masked truncated rows are refused beside it, so here the tools wrote all."""
    silent = {
        key: [Recorded(r.prompt_ids, r.completion_ids, [0] * len(r.tool_mask), r.completion) for r in group]
        for key, group in scene(pool).items()
    }
    (step,) = train(make_trainer(tmp_path, ("kl",)), silent).steps
    assert step.losses == [0.0] and not step.gradient.any()
    assert step.metrics["kl_reward/k1_seq"] == [0.0]


@pytest.mark.parametrize(
    ("channels", "errors", "reason"),
    [({}, NO_ERRORS, "no error turn was found"), ({"hints": ColumnHints()}, ERRORS, "excluded/no_hint")],
)
def test_a_channel_that_finds_nothing_warns_once_and_says_why(
    tmp_path: Path, pool: Rollouts, monkeypatch: pytest.MonkeyPatch, channels: Any, errors: Any, reason: str
) -> None:
    monkeypatch.setattr(composer_rl.trainer, "PATIENCE", 2)
    trainer = make_trainer(tmp_path, ("sdpo",), channels=channels, max_steps=3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(trainer, scene(pool, errors))
    (message,) = (str(w.message) for w in caught if "nothing to train on" in str(w.message))
    assert message.startswith("alpha_sdpo > 0 had nothing to train on in 2 steps: ") and reason in message


# --- rows stay together --------------------------------------------------------------------------------------------


def test_everything_stays_with_its_row_through_shuffle_split_and_reuse(tmp_path: Path, pool: Rollouts) -> None:
    """Four steps per generation and two passes over it, in windows of two, all signals on."""
    trainer = make_trainer(
        tmp_path,
        SIGNALS["all"],
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        steps_per_generation=4,
        num_iterations=2,
        max_steps=8,
    )
    rollouts = {(*r.prompt_ids, *r.completion_ids): r for group in scene(pool).values() for r in group}
    advantages: list[dict[tuple[int, ...], float]] = []
    score = trainer._generate_and_score_completions

    def scored(inputs: Any) -> dict[str, Any]:
        batch: dict[str, Any] = score(inputs)
        advantages.append(dict(zip(tokens_of(batch), batch["advantages"].tolist(), strict=True)))
        return batch

    trainer._generate_and_score_completions = scored
    watch = train(trainer, scene(pool))
    header = len(trainer.teacher_rows.renderer.header)
    assert len(watch.steps) == 8 and len(watch.inputs) == 16 and len(advantages) == 2
    assert all(len(set(of_generation.values())) == 8 for of_generation in advantages), (
        "rows must differ to be told apart"
    )

    for micro, inputs in enumerate(watch.inputs):
        for number, ids in enumerate(tokens_of(inputs)):
            rollout = rollouts[ids]
            assert inputs["tool_mask"][number][: len(rollout.tool_mask)].tolist() == rollout.tool_mask
            assert inputs["advantages"][number].item() == advantages[micro // 8][ids]
            assert inputs["sdpo_facts"][number, FACTS.index("eligible_rows")] == bool(rollout.error_turns)
            places = inputs["ctx_teacher_attention_mask"][number].any(dim=-1).nonzero()[:, 0].tolist()
            assert len(places) == len(rollout.error_turns)
            for place, turn in zip(places, rollout.error_turns, strict=True):
                distilled = inputs["sdpo_loss_mask"][number, place]
                assert inputs["student_response_idx"][number, place][distilled].tolist() == [
                    *range(turn.start, turn.end)
                ]
                taught = inputs["ctx_teacher_input_ids"][number, place]
                shown = taught[inputs["teacher_response_idx"][number, place][distilled] + 1]
                assert shown.tolist() == rollout.completion_ids[turn.start : turn.end]
                before = (rollout.prompt_ids + rollout.completion_ids[: turn.start])[:-header]
                assert taught[: len(before)].tolist() == before

    # Each window has the tokens and the pairs of its own two micro-batches.
    for step in range(8):
        window = watch.inputs[2 * step : 2 * step + 2]
        tokens = sum(int(inputs["sdpo_loss_mask"].sum()) for inputs in window)
        assert [inputs["sdpo_window_tokens"].item() for inputs in window] == [tokens] * 2
        assert watch.steps[step].metrics["sdpo/distilled_tokens"] == [tokens]
        weights = torch.cat([inputs["dpo_weight"] for inputs in window])
        chosen = [ids for inputs in window for ids in inputs["dpo_chosen_input_ids"].tolist()]
        pairs = trainer.replay._update(step)
        assert int((weights > 0).sum()) == PAIRS_PER_UPDATE == len(set(pairs))
        assert all(math.isclose(inputs["dpo_window_weight"].item(), weights.sum()) for inputs in window)
        drawn = {tuple(ids) for ids, weight in zip(chosen, weights.tolist(), strict=True) if weight}
        for pair in pairs:
            own = trainer.replay.pairs[pair].chosen.input_ids
            assert any(ids[: len(own)] == own for ids in drawn)


# --- the contract --------------------------------------------------------------------------------------------------


def test_the_constructor_has_the_names_and_defaults_of_the_contract() -> None:
    parameters = inspect.signature(ComposerTrainer.__init__).parameters
    contract = {
        "alpha_sdpo": 0.0,
        "beta_replay": 0.0,
        "sdpo_jsd_beta": 0.5,
        "sdpo_temperature": None,
        "sdpo_token_clip": None,
        "replay_dpo_beta": 0.1,
        "strict_sdpo_alignment": True,
        "kl_in_reward": False,
        "kl_estimator": "k1",
        "heldout_guard": None,
        "heldout_eval_fn": None,
        "strict_killswitch": True,
    }
    for name, default in contract.items():
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert (type(parameters[name].default), parameters[name].default) == (type(default), default), name
    assert ComposerReplicationTrainer is ComposerTrainer


def test_the_pure_functions_are_public() -> None:
    from composer_rl.losses import apply_kl_in_reward, generalized_jsd_loss, kl_penalty_per_sequence

    contract = {
        apply_kl_in_reward: ["rewards", "kl", "coef"],
        kl_penalty_per_sequence: ["logps", "ref_logps", "mask", "estimator"],
        generalized_jsd_loss: ["student_logits", "teacher_logits", "mask", "beta", "temperature", "token_clip"],
    }
    for function, names in contract.items():
        assert [*inspect.signature(function).parameters] == names


@pytest.mark.parametrize(
    ("channels", "reason"),
    [
        ({"alpha_sdpo": 0.5}, "alpha_sdpo=0.5 needs a hint source"),
        ({"beta_replay": 0.5}, "beta_replay=0.5 needs pairs"),
        ({"heldout_guard": object()}, "heldout_guard"),
    ],
)
def test_a_weight_without_its_source_is_refused(tmp_path: Path, channels: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make_trainer(tmp_path, channels=channels)


@pytest.mark.parametrize("signals", SIGNALS)
def test_the_contracts_metrics_come_once_per_optimizer_step_and_add_up(run: Callable[..., Watch], signals: str) -> None:
    """Under an accumulation of four; the total is also what the micro-batches' backwards started from."""
    (step,) = run(SIGNALS[signals], 2).steps
    values = {}
    for name, appended in step.metrics.items():
        if name.startswith(("loss/", "sdpo/", "replay/", "kl_reward/")):
            (values[name],) = appended
    assert set(TERMS) == {name for name in values if name.startswith("loss/")}
    grpo, sdpo, replay, total, alpha, beta = (values[name] for name in TERMS)
    assert (alpha, beta) == (ALPHA * ("sdpo" in SIGNALS[signals]), BETA * ("replay" in SIGNALS[signals]))
    assert (sdpo > 0, replay > 0) == (alpha > 0, beta > 0)
    assert total == pytest.approx(grpo + alpha * sdpo + beta * replay, rel=1e-6)
    assert total == pytest.approx(sum(step.losses), rel=1e-5)


def test_a_log_over_two_steps_is_the_mean_of_both(tmp_path: Path, pool: Rollouts) -> None:
    """A log in between, from inside the loss, would drain TRL's metrics."""
    trainer = make_trainer(tmp_path, SIGNALS["all"], logging_steps=2, max_steps=2)
    metrics = train(trainer, scene(pool)).steps[-1].metrics
    logged = trainer.state.log_history[0]
    for name in ("reward", *TERMS, "sdpo/distilled_tokens", "replay/margin", "kl_reward/k1_seq"):
        assert len(metrics[name]) == 2 and logged[name] == pytest.approx(sum(metrics[name]) / 2)
    assert metrics["sdpo/distilled_tokens"][0] != metrics["sdpo/distilled_tokens"][1]


def test_plain_python_trains_with_everything_on(tmp_path: Path) -> None:
    """Live rollouts, no config: two steps that change the weights and log every signal."""
    trainer = make_trainer(tmp_path, SIGNALS["all"], reward=exact_total, max_steps=2)
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    trainer.train()
    assert not all(map(torch.equal, before, trainer.model.parameters()))
    rows = trainer.state.log_history[:2]
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert {*TERMS, "reward", "sdpo/eligible_rows", "replay/pairs", "kl_reward/k1_seq"} <= row.keys()
        assert row["loss/total"] == pytest.approx(row["loss"], abs=1e-5) and math.isfinite(row["grad_norm"])
        assert row["sdpo/eligible_rows"] > 0 and row["replay/pairs"] == PAIRS_PER_UPDATE


if __name__ == "__main__":
    torch.set_num_threads(1)
    place = Path(sys.argv[1])
    torch.save(rank_program(place), place / f"rank{os.environ['RANK']}.pt")
    # Torch's own teardown of two ranks sometimes aborts after all is done.
    sys.stdout.flush()
    os._exit(0)
