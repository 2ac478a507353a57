"""KL in the reward equals its definition on one and two ranks, costs one forward, and refuses what it cannot keep.

As a program, one rank of a recorded training: RANK and WORLD_SIZE in the environment, the folder to write to as
argument.
"""

import os
import socket
import subprocess
import sys
import warnings
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import compose_run, composer_train
from datasets import Dataset
from heldout_rank import make_policy, make_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2VLConfig
from trl import GRPOConfig

from composer_rl.arguments import signal_arguments
from composer_rl.channels.kl import KLInReward, shaped_advantages, validate_kl_in_reward_config
from composer_rl.config import PACKAGE_DIR, plan_batch
from composer_rl.model import load_tokenizer
from composer_rl.objective import objective_arguments
from composer_rl.task.load import load_task
from composer_rl.task.shop import Shop, make_rows
from composer_rl.trainer import ComposerTrainer

TINY = PACKAGE_DIR / "assets" / "tiny"
COEF = 0.1
TEMPERATURE = 0.8
GROUP = 8
WEIGHTS = (1.0, 0.5)
STEPS = 4
ITERATIONS = 2


# --- a training that keeps what it saw ------------------------------------------------------------------------


def score_of(ids: list[int]) -> tuple[float, float]:
    """Two rewards that follow from the sampled tokens alone; NaN where the function gives none."""
    total = sum(ids)
    return (float("nan") if total % 7 == 0 else total % 5 / 4), (float("nan") if total % 7 < 3 else len(ids) / 100)


def first(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [score_of(ids)[0] for ids in completion_ids]


def second(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [score_of(ids)[1] for ids in completion_ids]


@dataclass
class Record:
    """What one rank saw: per generation the policy, the scored batch and the forwards; and each micro-batch."""

    policies: list[dict[str, torch.Tensor]] = field(default_factory=list)
    generations: list[dict[str, Any]] = field(default_factory=list)
    # (is the reference, rows per forward, gradient on) of each log-prob computation while scoring.
    forwards: list[list[tuple[bool, int | None, bool]]] = field(default_factory=list)
    micro_batches: list[dict[str, Any]] = field(default_factory=list)
    logs: list[dict[str, Any]] = field(default_factory=list)
    logged_advantages: list[float] = field(default_factory=list)


class Recorder(ComposerTrainer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.record = Record()
        super().__init__(*args, **kwargs)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        self.record.policies.append({name: value.clone() for name, value in self.model.state_dict().items()})
        self.record.forwards.append([])
        self.scoring = True
        output = super()._generate_and_score_completions(inputs)
        self.scoring = False
        self.record.generations.append(dict(output))
        return output

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        if self.scoring:
            facts = (model is self.ref_model, kwargs["batch_size"], torch.is_grad_enabled())
            self.record.forwards[-1].append(facts)
        return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        self.record.micro_batches.append(dict(inputs))
        return super()._compute_loss(model, inputs)


def train(folder: Path, noise: float, **overrides: Any) -> Recorder:
    """Train the embedded policy, moved away from its reference by `noise`, and return the trainer with its record."""
    policy = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.dim() == 2:
                parameter += noise * parameter.std() * torch.randn(parameter.shape, generator=generator)
    arguments = {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "learning_rate": 3e-4,
        "lr_scheduler_type": "constant",
        "loss_type": "dr_grpo",
        "scale_rewards": "none",
        "beta": COEF,
        "temperature": TEMPERATURE,
        "num_generations": GROUP,
        "max_completion_length": 96,
        "max_tool_calling_iterations": 2,
        "reward_weights": list(WEIGHTS),
        **overrides,
    }
    trainer = Recorder(
        policy,
        reward_funcs=[first, second],
        args=GRPOConfig(**arguments),
        train_dataset=Dataset.from_list(make_rows(12, seed=1, split="train")),
        processing_class=AutoTokenizer.from_pretrained(TINY, padding_side="left"),
        environment_factory=Shop,
        kl_in_reward=True,
    )
    trainer.train()
    trainer.record.logs = trainer.state.log_history
    trainer.record.logged_advantages = list(trainer._logs["advantages"])
    return trainer


def train_off_policy(folder: Path) -> Recorder:
    """Two generations of three groups over all ranks, each for 4 updates x 2 passes."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    return train(
        folder,
        noise=0.05,
        per_device_train_batch_size=6 // ranks,
        steps_per_generation=STEPS,
        num_iterations=ITERATIONS,
        max_steps=2 * STEPS * ITERATIONS,
    )


@pytest.fixture(scope="module")
def off_policy(tmp_path_factory: pytest.TempPathFactory) -> Recorder:
    return train_off_policy(tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def on_policy(tmp_path_factory: pytest.TempPathFactory) -> Recorder:
    """One update per generation of two micro-batches, from a policy that is the reference."""
    folder = tmp_path_factory.mktemp("on")
    schedule = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 2}
    return train(folder, noise=0.0, **schedule, max_steps=2)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    """What the ranks of a two-process gloo run recorded."""
    folder = tmp_path_factory.mktemp("two")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in ("0", "1"):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_PORT": str(port)}
        environment = {**os.environ, **place, "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        ranks.append(subprocess.Popen([sys.executable, __file__, str(folder)], env=environment))
    try:
        assert [process.wait(timeout=180) for process in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
    return [Record(**torch.load(folder / f"rank{rank}.pt", weights_only=True)) for rank in (0, 1)]


# --- the definition, computed from the sampled tokens ---------------------------------------------------------


@dataclass(frozen=True)
class Row:
    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    # 1 where the model sampled the token, 0 where a tool wrote it.
    own: tuple[int, ...]


def rows_of(batch: dict[str, Any]) -> list[Row]:
    """The rows of a batch without their padding."""
    rows = []
    for number in range(len(batch["completion_ids"])):
        prompt = batch["prompt_ids"][number][batch["prompt_mask"][number].bool()]
        kept = batch["completion_mask"][number].bool()
        completion, own = (batch[name][number][kept].tolist() for name in ("completion_ids", "tool_mask"))
        rows.append(Row(tuple(prompt.tolist()), tuple(completion), tuple(own)))
    return rows


def logps_of(model: Any, row: Row) -> torch.Tensor:
    """Log-prob of each completion token of one row, from whole-vocabulary logits."""
    ids = torch.tensor([row.prompt + row.completion])
    with torch.no_grad():
        logps = torch.log_softmax(model(ids).logits[0] / TEMPERATURE, -1)
    places = torch.arange(len(row.prompt), ids.shape[1])
    return logps[places - 1, ids[0, places]]


def defined_advantages(policy: dict[str, torch.Tensor], rows: list[Row], tools_pay: bool = False) -> np.ndarray:
    """A = R' - mean of the group's R', R' = R - coef sum over own tokens of log pi - log ref, all in float64."""
    reference = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float64)
    sampler = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float64)
    sampler.load_state_dict(policy)
    shaped = []
    for row in rows:
        scores = [w * s for w, s in zip(WEIGHTS, score_of(list(row.completion)), strict=True)]
        reward = np.nan if np.isnan(scores).all() else np.nansum(scores)
        own = torch.ones(len(row.own)) if tools_pay else torch.tensor(row.own)
        kl = ((logps_of(sampler, row) - logps_of(reference, row)) * own).sum().item()
        shaped.append(reward - COEF * kl)
    groups = np.array(shaped).reshape(-1, GROUP)
    return np.nan_to_num(groups - np.nanmean(groups, axis=1, keepdims=True)).ravel()


def check_against_the_definition(records: list[Record]) -> None:
    for record in records:
        assert (len(record.generations), len(record.micro_batches)) == (2, 2 * STEPS * ITERATIONS)
    for number, policy in enumerate(records[0].policies):
        per_rank = [rows_of(record.generations[number]) for record in records]
        rows = [row for part in per_rank for row in part]
        expected = defined_advantages(policy, rows)
        got = np.concatenate([record.generations[number]["advantages"].numpy() for record in records])
        # float32 log-probs of up to 96 tokens are 1e-6 off each; the sum is taken a tenth.
        np.testing.assert_allclose(got, expected, atol=1e-5)
        # What a penalty on tool results, or none at all, would have given is far outside of that.
        assert np.abs(defined_advantages(policy, rows, tools_pay=True) - expected).max() > 1e-3
        assert np.abs(defined_advantages_without_kl(rows) - expected).max() > 1e-3

        # The same rows with the same advantages reach the loss, in each pass over them.
        by_row = dict(zip(rows, expected, strict=True))
        for record, part in zip(records, per_rank, strict=True):
            start = number * STEPS * ITERATIONS
            batches = record.micro_batches[start : start + STEPS * ITERATIONS]
            for again in range(ITERATIONS):
                one_pass = batches[again * STEPS : (again + 1) * STEPS]
                assert sorted(map(hash, part)) == sorted(hash(row) for batch in one_pass for row in rows_of(batch))
            for step, batch in enumerate(batches):
                wanted = [by_row[row] for row in rows_of(batch)]
                np.testing.assert_allclose(batch["advantages"].numpy(), wanted, atol=1e-5)
                assert torch.equal(batch["advantages"], batches[step % STEPS]["advantages"])


def defined_advantages_without_kl(rows: list[Row]) -> np.ndarray:
    scores = np.array([score_of(list(row.completion)) for row in rows]) * WEIGHTS
    rewards = np.where(np.isnan(scores).all(axis=1), np.nan, np.nansum(scores, axis=1)).reshape(-1, GROUP)
    return np.nan_to_num(rewards - np.nanmean(rewards, axis=1, keepdims=True)).ravel()


def test_advantages_equal_the_definition_on_one_rank(off_policy: Recorder) -> None:
    check_against_the_definition([off_policy.record])


def test_advantages_equal_the_definition_on_two_ranks_with_a_group_on_both(two_ranks: list[Record]) -> None:
    assert len(two_ranks[0].generations[0]["advantages"]) % GROUP, "no group would lie on both ranks"
    check_against_the_definition(two_ranks)
    metrics = [
        [{key: value for key, value in row.items() if key.startswith("kl_reward/")} for row in record.logs]
        for record in two_ranks
    ]
    assert any(metrics[0]) and metrics[0] == metrics[1]


def test_an_unscored_row_is_among_those_tried(off_policy: Recorder) -> None:
    rows = rows_of(off_policy.record.generations[0]) + rows_of(off_policy.record.generations[1])
    scores = np.array([score_of(list(row.completion)) for row in rows])
    assert 0 < np.isnan(scores).all(axis=1).sum() < len(rows) / 2


# --- the loss -------------------------------------------------------------------------------------------------


def test_the_loss_has_no_kl_of_its_own(off_policy: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = off_policy.record.micro_batches[-1]
    metrics = off_policy._metrics["train"]

    def loss() -> torch.Tensor:
        return off_policy._compute_loss(off_policy.model, batch).detach()

    shaped = loss()
    assert off_policy.beta == COEF, "TRL must go on computing the reference's log-probs"
    assert "kl" not in metrics
    monkeypatch.setattr(off_policy, "kl_in_reward", None)
    native = loss()
    assert "kl" in metrics
    monkeypatch.setattr(off_policy, "beta", 0.0)
    assert torch.equal(shaped, loss())
    assert not torch.isclose(shaped, native)
    metrics.clear()


def test_the_log_has_both_rewards_and_the_kl_once_per_generation(off_policy: Recorder) -> None:
    shown = [row for row in off_policy.record.logs if "kl_reward/k1_seq" in row]
    assert [row["step"] for row in shown] == [1, 1 + STEPS * ITERATIONS]
    assert not any("kl" in row for row in off_policy.record.logs)
    for row, batch in zip(shown, off_policy.record.generations, strict=True):
        tokens = (batch["completion_mask"] * batch["tool_mask"]).sum() / len(batch["advantages"])
        assert row["kl_reward/k1_token"] == pytest.approx(row["kl_reward/k1_seq"] / tokens.item(), rel=1e-5)
        assert row["kl_reward/raw_reward"] == pytest.approx(row["reward"], abs=1e-6)
        assert row["kl_reward/coef_sd_ratio"] > 0
    assert off_policy.record.logged_advantages == pytest.approx(
        off_policy.record.generations[-1]["advantages"].tolist()
    )


# --- the cost -------------------------------------------------------------------------------------------------


def test_one_policy_and_one_reference_forward_per_generation(off_policy: Recorder, on_policy: Recorder) -> None:
    # TRL's own sampling log-probs are used where there are any.
    assert off_policy.record.forwards == [[(False, 6, False), (True, 6, False)]] * 2
    # In chunks of the micro-batch, though the generation has two of them.
    assert on_policy.record.forwards == [[(True, 4, False), (False, 4, False)]] * 2
    assert "old_per_token_logps" not in on_policy.record.generations[0], "the ratio would no longer be exactly 1"


def test_the_kl_is_zero_while_the_policy_is_the_reference(on_policy: Recorder) -> None:
    start, later = (row for row in on_policy.record.logs if "kl_reward/k1_seq" in row)
    assert abs(start["kl_reward/k1_seq"]) < 1e-6
    assert start["kl_reward/shaped_reward"] == pytest.approx(start["kl_reward/raw_reward"], abs=1e-6)
    unshaped = defined_advantages_without_kl(rows_of(on_policy.record.generations[0]))
    np.testing.assert_allclose(on_policy.record.generations[0]["advantages"].numpy(), unshaped, atol=1e-6)
    assert abs(later["kl_reward/k1_seq"]) > 1e-4


# --- hand-worked numbers --------------------------------------------------------------------------------------


def reshape(channel: KLInReward, kl: list[list[float]], rewards: list[float], **batch: Any) -> tuple[Any, Any, Any]:
    """Advantages, metrics and log of one group of four, or two of two; kl is log pi - log ref of each token."""
    group = batch.pop("num_generations", 2)
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(gather=lambda values: values, process_index=0),
        reward_weights=torch.ones(1),
        num_generations=group,
        scale_rewards=batch.pop("scale_rewards", "none"),
        _logs={"advantages": deque([9.0] * 4, maxlen=4)},
    )
    ratios = torch.tensor(kl, dtype=torch.float64)
    output = {
        "advantages": torch.zeros(4, dtype=torch.float64),
        "completion_mask": torch.ones_like(ratios),
        "old_per_token_logps": ratios - 1,
        "ref_per_token_logps": torch.full_like(ratios, -1),
        **batch,
    }
    metrics = channel.reshape_advantages(trainer, output, torch.tensor(rewards)[:, None])
    return output["advantages"].tolist(), metrics, list(trainer._logs["advantages"])


# K = 2, 0 and 1, 3; R' = 0.8, 0 and 0.9, 0.7.
PER_TOKEN = [[1.5, 0.5], [-1.0, 1.0], [0.0, 1.0], [2.0, 1.0]]
REWARDS = [1.0, 0.0, 1.0, 1.0]


def test_advantages_and_metrics_by_hand() -> None:
    advantages, metrics, logged = reshape(KLInReward(0.1), PER_TOKEN, REWARDS)
    assert advantages == pytest.approx([0.4, -0.4, 0.1, -0.1])
    assert logged == pytest.approx(advantages)
    assert metrics == pytest.approx(
        {
            "kl_reward/k1_seq": 6 / 4,
            "kl_reward/k1_token": 6 / 8,
            "kl_reward/raw_reward": 0.75,
            "kl_reward/shaped_reward": 0.6,
            # Within groups K deviates by 1 and R by sqrt(0.5 / 4).
            "kl_reward/coef_sd_ratio": 0.1 / (0.5 / 4) ** 0.5,
        }
    )


def test_raw_std_divides_by_the_raw_rewards_deviation_and_drops_groups_without_one() -> None:
    by_group, _, _ = reshape(KLInReward(0.1, "k1", "raw_std"), PER_TOKEN, REWARDS, scale_rewards="group")
    assert by_group == pytest.approx([0.4 / (0.5**0.5 + 1e-4), -0.4 / (0.5**0.5 + 1e-4), 0.0, 0.0])
    by_batch, _, _ = reshape(KLInReward(0.1, "k1", "raw_std"), PER_TOKEN, REWARDS, scale_rewards="batch")
    assert by_batch == pytest.approx([0.4 / 0.5001, -0.4 / 0.5001, 0.1 / 0.5001, -0.1 / 0.5001])


def test_equal_rewards_that_round_differently_have_no_deviation() -> None:
    rewards = torch.tensor([0.7 + 0.1, 0.8, 0.8, 0.9 - 0.1], dtype=torch.float64)
    assert len(set(rewards.tolist())) > 1
    shaped = rewards - torch.tensor([0.0, 0.1, 0.2, 0.3])
    assert shaped_advantages(rewards, shaped, 4, "group").tolist() == [0.0] * 4


def test_padding_and_tool_results_pay_nothing() -> None:
    kl = [[1.5, 0.5, 50.0], [-1.0, 1.0, 60.0], [70.0, 0.0, 1.0], [2.0, 80.0, 1.0]]
    masks = {
        "completion_mask": torch.tensor([[1, 1, 0], [1, 1, 0], [1, 1, 1], [1, 1, 1]]),
        "tool_mask": torch.tensor([[1, 1, 1], [1, 1, 1], [0, 1, 1], [1, 0, 1]]),
    }
    advantages, metrics, _ = reshape(KLInReward(0.1), kl, REWARDS, **masks)
    assert advantages == pytest.approx([0.4, -0.4, 0.1, -0.1])
    assert metrics["kl_reward/k1_token"] == pytest.approx(6 / 8)


def test_a_row_without_a_score_stays_out_of_the_baseline() -> None:
    kl = [[1.0], [99.0], [0.0], [0.0]]
    advantages, metrics, _ = reshape(KLInReward(0.1), kl, [1.0, float("nan"), 0.0, 0.0], num_generations=4)
    assert advantages == pytest.approx([0.6, 0.0, -0.3, -0.3])
    assert metrics["kl_reward/shaped_reward"] == pytest.approx(0.3)
    # The unscored row's K is in the KL, not in its weight against the reward.
    assert metrics["kl_reward/k1_seq"] == pytest.approx(25.0)
    assert metrics["kl_reward/coef_sd_ratio"] == pytest.approx(0.1)


def test_rewards_without_spread_have_no_ratio_to_report() -> None:
    _, metrics, _ = reshape(KLInReward(0.1), PER_TOKEN, [1.0] * 4)
    assert np.isnan(metrics["kl_reward/coef_sd_ratio"])


def test_k3_penalises_by_k3_and_still_reports_k1() -> None:
    log2 = float(np.log(2.0))
    advantages, metrics, _ = reshape(KLInReward(1.0, "k3"), [[log2], [0.0], [-log2], [0.0]], [0.0] * 4)
    # d = log ref - log pi: exp(d) - 1 - d.
    above, below = -0.5 + log2, 1.0 - log2
    assert advantages == pytest.approx([-above / 2, above / 2, -below / 2, below / 2])
    assert metrics["kl_reward/k1_seq"] == pytest.approx(0.0)


# --- what is refused ------------------------------------------------------------------------------------------


def config(folder: Path, **overrides: Any) -> GRPOConfig:
    sound = {"beta": 1e-3, "loss_type": "dr_grpo", "scale_rewards": "none", "use_cpu": True, "bf16": False}
    return GRPOConfig(output_dir=str(folder), report_to="none", **{**sound, **overrides})


def test_a_sound_config_passes_without_a_word(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        validate_kl_in_reward_config(config(tmp_path), str(TINY))
        validate_kl_in_reward_config(config(tmp_path, scale_rewards="batch"), str(TINY), "k1", "raw_std")


@pytest.mark.parametrize(
    ("overrides", "channel", "message"),
    [
        ({"scale_rewards": "group"}, (), r"args.scale_rewards=group: .* use args.scale_rewards=none, or .*=raw_std"),
        ({"scale_rewards": "batch"}, (), "args.scale_rewards=batch"),
        ({}, ("k1", "raw_std"), "kl_reward_scaling=raw_std: has no effect with args.scale_rewards=none"),
        ({"multi_objective_aggregation": "normalize_then_sum"}, (), "args.multi_objective_aggregation=normalize"),
        ({"mask_truncated_completions": True}, (), "args.mask_truncated_completions=True"),
        ({"beta": 0.0}, (), "args.beta=0.0: is the coefficient of the KL in the reward; must be above 0"),
        ({}, ("k2",), "kl_estimator=k2: must be k1 or k3"),
        ({}, ("k1", "std"), "kl_reward_scaling=std: must be none or raw_std"),
    ],
)
def test_what_the_reward_cannot_keep_is_refused(
    tmp_path: Path, overrides: dict[str, Any], channel: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as refusal:
        validate_kl_in_reward_config(config(tmp_path, **overrides), str(TINY), *channel)
    assert "\n" not in str(refusal.value)


def test_a_model_whose_reference_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the model object has no path"):
        validate_kl_in_reward_config(config(tmp_path), make_policy(make_tokenizer()))


def test_the_trainer_refuses_before_trl_looks_for_the_reference(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    with pytest.raises(ValueError, match="the model object has no path"):
        ComposerTrainer(
            make_policy(tokenizer),
            reward_funcs=first,
            args=config(tmp_path),
            train_dataset=Dataset.from_list([{"prompt": "red"}]),
            processing_class=tokenizer,
            kl_in_reward=True,
        )


def test_a_vision_language_model_is_refused_as_an_object_and_as_a_path(tmp_path: Path) -> None:
    vision = Qwen2VLConfig()
    vision.save_pretrained(tmp_path / "vision")
    for model in (SimpleNamespace(config=vision), str(tmp_path / "vision")):
        with pytest.raises(ValueError, match="Qwen2VLConfig is a vision-language model"):
            validate_kl_in_reward_config(config(tmp_path), model)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "sapo"])
def test_a_loss_that_divides_by_length_is_warned_of(tmp_path: Path, loss_type: str) -> None:
    with pytest.warns(UserWarning, match=f"args.loss_type={loss_type}: divides by length"):
        validate_kl_in_reward_config(config(tmp_path, loss_type=loss_type), str(TINY))
    run = compose_run(f"objective={loss_type}", "objective.scale_rewards=none", "kl=reward")
    assert f"objective.loss_type={loss_type}: divides by length" in "".join(plan_batch(run).warnings)


def test_k3_is_warned_of_as_an_experiment(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="kl_estimator=k3: an experiment"):
        validate_kl_in_reward_config(config(tmp_path), str(TINY), "k3")
    assert "kl.estimator=k3: an experiment" in "".join(plan_batch(compose_run("kl=reward", "kl.estimator=k3")).warnings)
    assert plan_batch(compose_run("kl=reward")).warnings == ()


# --- the command line -----------------------------------------------------------------------------------------


def test_the_preset_dry_runs_and_says_where_the_kl_is(tmp_path: Path) -> None:
    done = composer_train("kl=reward", "dry_run=true", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "k1 in the reward, coefficient 0.001" in done.stdout
    passes = "1 forward-backward, 1 for the sampling policy's log-probs, 1 for the reference's log-probs"
    assert passes in " ".join(done.stdout.split())


def test_the_preset_reaches_the_trainer() -> None:
    run = compose_run("objective=dapo", "kl=reward", "kl.reward_scaling=raw_std", "kl.coef=0.02")
    assert objective_arguments(run.objective, run.kl)["beta"] == 0.02
    signals = signal_arguments(run, load_task(run.task), load_tokenizer(run.model, tools=True))
    chosen = {key: value for key, value in signals.items() if key.startswith("kl_")}
    assert chosen == {"kl_in_reward": True, "kl_estimator": "k1", "kl_reward_scaling": "raw_std"}


if __name__ == "__main__":
    torch.set_num_threads(1)
    recorded = train_off_policy(Path(sys.argv[1])).record
    torch.save(vars(recorded), Path(sys.argv[1]) / f"rank{os.environ['RANK']}.pt")
    # Torch's own teardown of two ranks sometimes aborts after all is done.
    sys.stdout.flush()
    os._exit(0)
