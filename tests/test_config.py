"""Every mistake on the command line is one line, exit code 2, before torch; every preset composes and loads."""

import dataclasses
import math
import os
import re
import subprocess
import sys

import pytest
import yaml
from conftest import compose_run, composer_train
from omegaconf import OmegaConf

from composer_rl.config import (
    EXTRA_OWNERS,
    GROUPS,
    ConfigError,
    RunConfig,
    config_dir,
    load_run,
    plan_batch,
)

# What a preset needs beside itself.
INPUTS = {"model=hf": ["model.path=some/folder"]}
PRESETS = sorted(
    f"{path.parent.name}={path.stem}" for path in config_dir().glob("*/*.yaml") if path.parent.name != "hydra"
)

MISTAKES = {
    "unknown option": (["objective=daop"], "unknown option objective=daop; objective has bnpo, cispo, dapo"),
    "misspelt key": (["objective.epsilom=0.2"], "unknown knob objective.epsilom; did you mean epsilon?"),
    "misspelt key with a plus": (["+objective.epsilom=0.2"], "unknown knob objective.epsilom; did you mean epsilon?"),
    "misspelt group with a plus": (["+hardwar=cpu"], "unknown knob hardwar; did you mean hardware?"),
    "misspelt trainer key": (["trainer.learning_rat=1e-6"], "did you mean learning_rate?"),
    "misspelt reward key": (["+task.rewards.exact_total.wieght=2"], "did you mean weight?"),
    "wrong type": (["objective.epsilon=abc"], "objective.epsilon: value 'abc'"),
    "wrong type for a whole number": (["trainer.num_generations=2.5"], "trainer.num_generations: value '2.5'"),
    "the text None": (["generation.name=None"], "generation.name=None: is the text None; write null"),
    "text for a flag": (["objective.mask_truncated_completions=perhaps"], "mask_truncated_completions"),
    "syntax": (["objective.epsilon=[1"], "no viable alternative at input '[1'"),
    "out of range": (["objective.epsilon=-1"], "objective.epsilon=-1.0: must be above 0"),
    "not a number": (["trainer.learning_rate=nan"], "trainer.learning_rate=nan: must be above 0"),
    "a share above 1": (["generation.top_p=1.5"], "generation.top_p=1.5: must be above 0 and at most 1"),
    "missing value": (["model=hf"], "missing value model.path: give it on the command line, model.path=..."),
    "batch that does not divide": (
        ["trainer.generation_batch_size=60"],
        "trainer.generation_batch_size=60: must be a multiple of 8",
    ),
    "batch that updates do not divide": (["objective=dapo", "trainer.generation_batch_size=40"], "nearest: 32 or 48"),
    "cispo capped below 1": (["objective=cispo", "objective.epsilon_high=0.2"], "cispo reads it as the absolute cap"),
    "cispo without a cap": (["objective=cispo", "objective.epsilon_high=null"], "objective.epsilon_high=None"),
    "sequence-level objective at token level": (
        ["objective=gspo", "objective.importance_sampling_level=token"],
        "objective.importance_sampling_level=token: gspo is defined at sequence level",
    ),
    "sequence level with a token loss": (
        ["objective=dapo", "objective.importance_sampling_level=sequence"],
        "needs the sequence-mean loss_type=grpo, not dapo",
    ),
    "delta inside the clip": (["objective=dapo", "objective.delta=1.2"], "must exceed 1 + epsilon_high = 1.28"),
    "delta where it is not read": (["objective=sapo", "objective.delta=9"], "has no effect with loss_type=sapo"),
    "owned field in extra": (["+trainer.extra.beta=0.1"], "trainer.extra.beta=0.1: is set by kl.coef"),
    "owned field of the same name in extra": (["+trainer.extra.epsilon=0.1"], "is set by objective.epsilon"),
    "SDPO without hints": (
        ["channels.alpha_sdpo=0.1", "task.hints=[]"],
        "channels.alpha_sdpo=0.1: needs hints, and task=shop has no rules",
    ),
    "replay without pairs": (
        ["channels=replay", "task.replay_pairs=null"],
        "channels.beta_replay=0.1: needs preference pairs; give task.replay_pairs=FILE",
    ),
    "negative weight": (["channels.alpha_sdpo=-1"], "channels.alpha_sdpo=-1.0: must be at least 0"),
    "flip rate that is not read": (["channels.replay_flip_rate=0.1"], "use channels.replay_loss=robust"),
    "unknown teacher": (["channels.sdpo_teacher=emma"], "expected one of [ema, frozen, live]"),
    "guard": (["guard=strict"], "unknown knob guard"),
    "KL in a reward that is scaled": (
        ["objective=dapo", "kl=reward"],
        "objective.scale_rewards=group: a KL in the reward changes the standard deviation it would be divided by, and"
        " in a group of equal rewards its coefficient cancels; use objective.scale_rewards=none, or divide by the raw"
        " reward's with kl.reward_scaling=raw_std",
    ),
    "KL in a reward that is scaled by the batch": (
        ["kl=reward", "objective.scale_rewards=batch"],
        "objective.scale_rewards=batch: a KL in the reward changes",
    ),
    "raw deviation without scaling": (
        ["kl=reward", "kl.reward_scaling=raw_std"],
        "kl.reward_scaling=raw_std: has no effect with objective.scale_rewards=none; use kl.reward_scaling=none",
    ),
    "KL in the reward with masked rollouts": (
        ["kl=reward", "objective.mask_truncated_completions=true"],
        "use objective.mask_truncated_completions=false",
    ),
    "KL in rewards that are scaled one by one": (
        ["objective=grpo", "kl=reward", "objective.multi_objective_aggregation=normalize_then_sum"],
        "use objective.multi_objective_aggregation=sum_then_normalize",
    ),
    "KL in the reward without weight": (
        ["kl=reward", "kl.coef=0"],
        "kl.coef=0.0: must be above 0 with kl.placement=reward",
    ),
    "KL in the reward with the loss's correction": (
        ["kl=reward", "kl.use_bias_correction_kl=true"],
        "kl.use_bias_correction_kl=True: has no effect with kl.placement=reward",
    ),
    "k1 in the loss": (["kl=loss", "kl.estimator=k1"], "kl.estimator=k1: TRL's KL in the loss is k3"),
    "reward scaling without KL in the reward": (
        ["objective=grpo", "kl.reward_scaling=raw_std"],
        "kl.reward_scaling=raw_std: has no effect with kl.placement=loss; use kl=reward",
    ),
    "estimator without KL": (["kl=none", "kl.estimator=k3"], "kl.estimator=k3: has no effect with kl.placement=none"),
    "KL placement that is not there": (["kl.placement=prompt"], "expected one of [none, loss, reward]"),
    "KL weight without KL": (["kl=none", "kl.coef=0.1"], "kl.coef=0.1: has no effect with kl.placement=none"),
    "KL without weight": (["kl=loss", "kl.coef=0"], "kl.coef=0.0: must be above 0"),
    "scaling that is not read": (
        ["objective.multi_objective_aggregation=normalize_then_sum"],
        "objective.scale_rewards=none: has no effect",
    ),
    "two options of one group": (["objective=[dapo,gspo]"], "objective=[...]: takes one option"),
    "own weights under the embedded preset": (["model.path=Qwen/Qwen3-8B"], "add model=hf"),
    "gold that is not a reward": (["task.gold=speed"], "task.gold=speed: must be one of task.rewards: exact_total"),
    "no weight anywhere": (["task.rewards.exact_total.weight=0"], "give at least one reward a weight"),
    "tracker that is not there": (["tracking.report_to=[wandb]"], "pip install 'composer-rl[wandb]'"),
    "tracker that does not exist": (["tracking.report_to=[mlfow]"], "must be one of tensorboard, trackio, wandb"),
    "warm-up that the schedule ignores": (["trainer.warmup_steps=5"], "use trainer.lr_scheduler_type="),
    "launcher": ([], "RANK is set"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(case, tmp_path):
    arguments, expected = MISTAKES[case]
    environment = {"RANK": "0"} if case == "launcher" else {}
    # Modules that fail to import stand for those that must not be loaded.
    for heavy in ("torch", "transformers", "trl"):
        (tmp_path / "poison" / heavy).mkdir(parents=True)
        (tmp_path / "poison" / heavy / "__init__.py").write_text("raise RuntimeError('imported a heavy module')\n")
    done = composer_train(*arguments, cwd=tmp_path, PYTHONPATH=f"{tmp_path / 'poison'}:{os.getcwd()}", **environment)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert expected in done.stderr
    assert not (tmp_path / "runs").exists(), "a refused run must leave no folder behind"


@pytest.mark.parametrize("arguments", [["--cfg", "job"], ["--help"], ["-sc", "query=bash"]], ids=" ".join)
def test_looking_never_imports_torch(arguments, tmp_path):
    completion = {"COMP_LINE": "composer-train obj", "COMP_POINT": "18"} if "-sc" in arguments else {}
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "composer_rl.train", *arguments],
        cwd=tmp_path,
        env=os.environ | completion,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    assert "objective" in done.stdout
    imported = set(re.findall(r"\| +([\w.]+)$", done.stderr, re.MULTILINE))
    assert "omegaconf" in imported
    assert not imported & {"torch", "transformers", "trl", "datasets", "accelerate", "matplotlib"}


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_composes_and_loads(preset):
    run = compose_run(preset, *INPUTS.get(preset, []))
    assert isinstance(run, RunConfig)


def test_every_group_file_states_every_knob_of_its_schema():
    for path in config_dir().glob("*/*.yaml"):
        if path.parent.name == "experiment":
            continue
        schema = dict(zip(GROUPS, [None] * len(GROUPS), strict=True))
        assert path.parent.name in schema, f"{path.parent.name}/ has no schema"
        (kind,) = [f.type for f in dataclasses.fields(RunConfig) if f.name == path.parent.name]
        stated = set(yaml.safe_load(path.read_text()))
        assert stated == {field.name for field in dataclasses.fields(kind)}, path


def test_every_yaml_opens_with_a_comment_and_has_no_inline_ones():
    for path in config_dir().rglob("*.yaml"):
        lines = path.read_text().splitlines()
        assert lines[0].startswith("# "), path
        for line in lines:
            assert not re.search(r"\S\s+# ", re.sub(r'"[^"]*"', "", line)) or line.lstrip().startswith("#"), line


def test_the_command_line_wins_over_an_experiment_and_the_experiment_over_a_group():
    assert compose_run("experiment=smoke").trainer.max_steps == 3
    assert compose_run("experiment=smoke", "trainer.max_steps=7").trainer.max_steps == 7
    assert compose_run("trainer.max_steps=7", "experiment=smoke").trainer.max_steps == 7


def test_a_knob_missing_from_a_users_preset_is_named(tmp_path):
    (tmp_path / "objective").mkdir()
    (tmp_path / "objective" / "mine.yaml").write_text("name: mine\n")
    done = composer_train("--config-dir", str(tmp_path), "objective=mine", cwd=tmp_path)
    assert done.returncode == 2
    assert "missing value objective.reproduces" in done.stderr


def test_trainer_extra_names_an_owner_for_every_field_the_run_sets():
    run = compose_run("+trainer.extra.dataloader_num_workers=0")
    assert run.trainer.extra == {"dataloader_num_workers": 0}
    for field in ("seed", "output_dir", "gradient_accumulation_steps", "temperature", "beta", "bf16"):
        assert field in EXTRA_OWNERS


@pytest.mark.parametrize("ranks", [1, 3, 7, 8])
@pytest.mark.parametrize("name", ["dr_grpo", "grpo", "bnpo", "dapo", "gspo", "cispo", "sapo"])
@pytest.mark.parametrize("micro", [1, 5, 64])
def test_the_batch_arithmetic_adds_up_for_every_objective_and_rank_count(name, ranks, micro):
    run = compose_run(f"objective={name}")
    run.hardware.num_processes = ranks
    run.trainer.max_micro_batch_size = micro
    run.trainer.generation_batch_size = 8 * 16 * ranks
    plan = plan_batch(run)
    assert plan.per_device_train_batch_size <= micro
    assert plan.rollouts_per_update * run.objective.updates_per_generation == plan.generation_batch_size
    assert plan.per_device_train_batch_size * plan.steps_per_generation * ranks == plan.generation_batch_size
    assert plan.steps_per_generation % plan.gradient_accumulation_steps == 0
    assert plan.prompts_per_generation * run.trainer.num_generations == plan.generation_batch_size


def test_the_micro_batch_is_the_largest_divisor_within_its_bound():
    run = compose_run("trainer.generation_batch_size=96", "trainer.max_micro_batch_size=50")
    plan = plan_batch(run)
    assert (plan.per_device_train_batch_size, plan.gradient_accumulation_steps) == (48, 2)


def test_the_nearest_valid_batch_sizes_are_valid():
    with pytest.raises(ConfigError) as error:
        compose_run("objective=dapo", "trainer.generation_batch_size=100")
    for size in re.findall(r"nearest: (\d+) or (\d+)", str(error.value))[0]:
        compose_run("objective=dapo", f"trainer.generation_batch_size={size}")


def test_another_objective_buys_the_same_rollouts_and_evaluations():
    for name, updates in (("dr_grpo", 1), ("gspo", 4), ("dapo", 16)):
        run = compose_run(f"objective={name}")
        assert run.trainer.eval_steps == 20 * updates
        assert plan_batch(run).generation_batch_size == 64
    assert compose_run("objective=dapo", "trainer.eval_steps=5").trainer.eval_steps == 5


def test_a_ratio_objective_with_one_update_and_a_small_update_are_warned_about():
    quiet = compose_run("objective=grpo")
    assert plan_batch(quiet).warnings == ()
    one = compose_run("objective=gspo", "objective.updates_per_generation=1")
    assert "the ratio stays 1" in "".join(plan_batch(one).warnings)
    small = compose_run("objective=dapo")
    assert "4 rollouts per update is fewer than 4 groups of 8" in "".join(plan_batch(small).warnings)


def test_a_jsd_beta_between_the_comparable_ones_is_warned_about():
    for beta, warned in ((0.0, False), (0.5, False), (1.0, False), (0.1, True)):
        run = compose_run("channels=sdpo", f"channels.sdpo_jsd_beta={beta}")
        assert ("moves the channel's weight" in "".join(plan_batch(run).warnings)) == warned
    assert plan_batch(compose_run("channels.sdpo_jsd_beta=0.1")).warnings == ()


def test_a_knob_of_a_channel_that_is_off_is_warned_about(tmp_path):
    # The dry run stops at the reward that cannot be imported, after the warnings.
    arguments = ["dry_run=true", "task.rewards.exact_total.function=no.such.thing"]
    knobs = ["channels.sdpo_jsd_beta=1", "channels.replay_loss=ipo"]
    off = composer_train(*arguments, *knobs, cwd=tmp_path).stderr
    assert "warning: channels.sdpo_jsd_beta has no effect with channels.alpha_sdpo=0" in off
    assert "warning: channels.replay_loss has no effect with channels.beta_replay=0" in off
    assert "no effect" not in composer_train(*arguments, *knobs, "channels=sdpo_replay", cwd=tmp_path).stderr


def test_a_composed_run_and_its_frozen_yaml_load_to_the_same_run(tmp_path):
    run = compose_run("objective=gspo", "seed=7")
    path = tmp_path / "run.yaml"
    path.write_text(OmegaConf.to_yaml(OmegaConf.structured(run)))
    assert load_run(OmegaConf.load(path)) == run
    assert math.isclose(run.objective.epsilon, 3e-4)
