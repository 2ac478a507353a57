"""Objective presets: what each one writes into GRPOConfig, field by field, and how the Python API guards it.

Regenerate the dump after a deliberate change: python tests/test_objective_presets.py --write
"""

import argparse
import dataclasses
import difflib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from transformers import TrainingArguments
from trl import GRPOConfig
from trl.trainer import grpo_config

from composer_rl.config import ConfigError, KLConfig, ObjectiveConfig, config_dir
from composer_rl.objective import PO_OBJECTIVES, make_dr_grpo_config, make_po_config, objective_arguments

GOLDEN = Path(__file__).parent / "golden" / "objectives.json"
OBJECTIVES = config_dir() / "objective"

# Every GRPOConfig field that can change what is optimised, whether or not a preset sets it: a default that
# TRL flips shows up as a difference in the dump.
ALGORITHM_FIELDS = (
    "beta",
    "cast_lm_head_to_fp32",
    "delta",
    "disable_dropout",
    "entropy_coef",
    "entropy_coef_delta",
    "entropy_coef_max",
    "entropy_coef_min",
    "entropy_target",
    "epsilon",
    "epsilon_high",
    "generation_batch_size",
    "gradient_accumulation_steps",
    "importance_sampling_level",
    "learning_rate",
    "loss_type",
    "lr_scheduler_type",
    "mask_truncated_completions",
    "max_completion_length",
    "max_grad_norm",
    "min_p",
    "multi_objective_aggregation",
    "num_generations",
    "num_iterations",
    "num_train_epochs",
    "off_policy_mask_threshold",
    "ref_model_mixup_alpha",
    "ref_model_sync_steps",
    "repetition_penalty",
    "reward_weights",
    "router_aux_loss_coef",
    "sapo_temperature_neg",
    "sapo_temperature_pos",
    "scale_rewards",
    "shuffle_dataset",
    "steps_per_generation",
    "sync_ref_model",
    "temperature",
    "top_entropy_quantile",
    "top_k",
    "top_p",
    "use_adaptive_entropy",
    "use_bias_correction_kl",
    "vespo_k_neg",
    "vespo_k_pos",
    "vespo_lambda_neg",
    "vespo_lambda_pos",
    "vllm_importance_sampling_cap",
    "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min",
    "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode",
    "warmup_steps",
)

# GRPOConfig's own fields that decide how it runs, not what is optimised.
OTHER_FIELDS = {
    "cache_implementation",
    "chat_template_kwargs",
    "ds3_gather_for_generation",
    "generation_kwargs",
    "log_completions",
    "log_completions_hub_repo",
    "log_multimodal",
    "log_unique_prompts",
    "max_tool_calling_iterations",
    "model_init_kwargs",
    "num_completions_to_print",
    "num_generations_eval",
    "pad_to_multiple_of",
    "transformers_continuous_batching_config",
    "trust_remote_code",
    "use_transformers_continuous_batching",
    "use_transformers_paged",
    "use_vllm",
    "vllm_enable_sleep_mode",
    "vllm_gpu_memory_utilization",
    "vllm_group_port",
    "vllm_max_model_length",
    "vllm_mode",
    "vllm_model_impl",
    "vllm_server_base_url",
    "vllm_server_host",
    "vllm_server_port",
    "vllm_server_timeout",
    "vllm_structured_outputs_regex",
    "vllm_tensor_parallel_size",
}


def on_cpu(output_dir):
    return {"use_cpu": True, "bf16": False, "report_to": "none", "output_dir": str(output_dir)}


def dump(output_dir):
    """Return the golden text: every algorithm field of every preset's GRPOConfig."""
    presets = {}
    for name in PO_OBJECTIVES:
        config = make_po_config(name, **on_cpu(output_dir))
        presets[name] = {field: getattr(config, field) for field in ALGORITHM_FIELDS}
    return json.dumps(presets, indent=2, sort_keys=True) + "\n"


def knobs(path):
    return OmegaConf.to_container(OmegaConf.load(path), resolve=False)


def test_every_algorithm_field_of_every_preset_equals_the_checked_in_dump(tmp_path):
    difference = difflib.unified_diff(
        GOLDEN.read_text().splitlines(), dump(tmp_path).splitlines(), "checked in", "now", lineterm="", n=60
    )
    assert not list(difference), "python tests/test_objective_presets.py --write, if the change is meant"


def test_every_field_that_trl_adds_to_grpo_is_sorted_into_algorithm_or_other():
    own = {f.name for f in dataclasses.fields(GRPOConfig)} - {f.name for f in dataclasses.fields(TrainingArguments)}
    assert own - set(ALGORITHM_FIELDS) == OTHER_FIELDS


@pytest.mark.parametrize("name", PO_OBJECTIVES)
def test_a_preset_states_every_knob_once_in_the_schemas_order(name):
    stated = knobs(OBJECTIVES / f"{name}.yaml")
    assert list(stated) == [field.name for field in dataclasses.fields(ObjectiveConfig)]
    assert list(stated["published_kl"]) == [field.name for field in dataclasses.fields(KLConfig)]
    assert stated["name"] == name


@pytest.mark.parametrize("name", PO_OBJECTIVES)
def test_a_preset_opens_with_its_paper_and_its_deviations_and_comments_stand_above_knobs(name):
    first, second, *rest = (OBJECTIVES / f"{name}.yaml").read_text().splitlines()
    assert first.startswith("# ") and "arXiv:" in first
    assert second.startswith("# Deviations: ")
    assert [line for line in rest if "#" in line and not line.startswith("# ")] == []


def test_the_kl_options_state_every_knob():
    for path in sorted((config_dir() / "kl").glob("*.yaml")):
        assert path.read_text().startswith("# ")
        assert list(knobs(path)) == [field.name for field in dataclasses.fields(KLConfig)], path.name


def test_every_schema_field_but_the_run_owned_ones_becomes_a_grpo_config_argument():
    objective, kl = preset("grpo")
    own = {"name", "reproduces", "updates_per_generation", "published_kl"}
    expected = {field.name for field in dataclasses.fields(ObjectiveConfig)} - own
    assert set(objective_arguments(objective, kl)) == expected | {"beta", "use_bias_correction_kl"}


def test_beta_is_the_kl_coefficient_wherever_the_kl_is():
    objective, published = preset("dr_grpo")
    assert objective_arguments(objective, published)["beta"] == 0.0
    for name, coef in (("none", 0.0), ("loss", 1e-3), ("reward", 1e-3)):
        values = OmegaConf.merge(OmegaConf.structured(KLConfig), OmegaConf.load(config_dir() / "kl" / f"{name}.yaml"))
        assert objective_arguments(objective, OmegaConf.to_object(values))["beta"] == coef
    assert objective_arguments(*preset("grpo"))["beta"] == 0.04


def test_enums_reach_trl_as_plain_text():
    arguments = objective_arguments(*preset("gspo"))
    assert {type(value) for value in arguments.values()} == {str, float, int, bool, type(None)}


def preset(name):
    values = OmegaConf.merge(OmegaConf.structured(ObjectiveConfig), OmegaConf.load(OBJECTIVES / f"{name}.yaml"))
    objective = OmegaConf.to_object(values)
    return objective, objective.published_kl


def test_reading_the_menu_of_objectives_imports_no_torch():
    code = "import sys, composer_rl.objective as o; print(*o.PO_OBJECTIVES); sys.exit('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == sorted(path.stem for path in OBJECTIVES.glob("*.yaml"))


def test_the_default_objective_is_dr_grpo_and_names_ignore_case(tmp_path):
    by_default = make_po_config(**on_cpu(tmp_path))
    assert (by_default.loss_type, by_default.scale_rewards) == ("dr_grpo", "none")
    named = make_po_config("Dr_GRPO", **on_cpu(tmp_path))
    alias = make_dr_grpo_config(**on_cpu(tmp_path))
    for field in ALGORITHM_FIELDS:
        assert getattr(by_default, field) == getattr(named, field) == getattr(alias, field), field


def test_an_unknown_name_lists_the_menu(tmp_path):
    with pytest.raises(ConfigError, match="objective=ppo: must be one of bnpo, cispo, dapo, dr_grpo, grpo, gspo, sapo"):
        make_po_config("ppo", **on_cpu(tmp_path))


def test_an_unknown_field_names_the_nearest(tmp_path):
    with pytest.raises(ConfigError, match=r"epsilom=0.1: is not a GRPOConfig field; did you mean epsilon\?"):
        make_po_config("dapo", epsilom=0.1, **on_cpu(tmp_path))


def test_overrides_reach_the_config(tmp_path):
    config = make_po_config("dapo", epsilon=0.1, learning_rate=3e-6, beta=0.01, **on_cpu(tmp_path))
    assert (config.epsilon, config.epsilon_high) == (0.1, 0.28)
    assert (config.learning_rate, config.beta, config.use_bias_correction_kl) == (3e-6, 0.01, False)
    assert make_po_config("grpo", beta=0.0, **on_cpu(tmp_path)).beta == 0.0


@pytest.mark.parametrize(
    ("overrides", "steps", "batch"),
    [
        ({}, 4, 32),
        ({"gradient_accumulation_steps": 2}, 8, 64),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 4}, 4, 32),
        ({"generation_batch_size": 16}, 2, 16),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 2, "num_iterations": 2}, 2, 16),
    ],
)
def test_a_generation_is_split_into_the_presets_updates_unless_the_caller_sizes_it(tmp_path, overrides, steps, batch):
    config = make_po_config("gspo", **overrides, **on_cpu(tmp_path))
    assert (config.steps_per_generation, config.generation_batch_size) == (steps, batch)


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("gspo", {"importance_sampling_level": "token"}, "gspo is defined at sequence level"),
        ("gspo", {"loss_type": "dapo"}, "needs the sequence-mean loss_type=grpo, not dapo"),
        ("gspo", {"steps_per_generation": 1}, "keeps the ratio at 1, so gspo's clipping never acts"),
        ("gspo", {"gradient_accumulation_steps": 4, "steps_per_generation": 4}, "give at least 8"),
        ("dapo", {"importance_sampling_level": "sequence"}, "use objective=gspo"),
        ("cispo", {"epsilon_high": 0.28}, "cispo reads it as the absolute cap"),
        ("cispo", {"epsilon_high": None}, "cispo reads it as the absolute cap"),
        ("dapo", {"delta": 1.28}, r"must exceed 1 \+ epsilon_high"),
        (
            "dapo",
            {"multi_objective_aggregation": "normalize_then_sum", "scale_rewards": "none"},
            "has no effect",
        ),
        ("dapo", {"loss_type": "vespo"}, "objective.loss_type: invalid value 'vespo'"),
        ("dapo", {"epsilon": "small"}, "objective.epsilon: value 'small'"),
        ("dapo", {"use_bias_correction_kl": True}, "has no effect with kl.placement=none"),
        ("dr_grpo", {"beta": -0.1}, "kl.coef=-0.1: must be at least 0"),
    ],
)
def test_an_override_that_breaks_the_objective_is_refused(tmp_path, name, overrides, message):
    with pytest.raises(ConfigError, match=message) as refusal:
        make_po_config(name, **overrides, **on_cpu(tmp_path))
    assert "\n" not in str(refusal.value)


def test_a_schedule_that_makes_a_clip_inert_is_warned_of(tmp_path):
    with pytest.warns(UserWarning, match="keeps the ratio at 1, so dapo's clipping never acts"):
        make_po_config("dapo", steps_per_generation=1, **on_cpu(tmp_path))


def test_a_value_that_trl_does_not_take_is_an_error_that_names_the_field(tmp_path, monkeypatch):
    class Drifted(GRPOConfig):
        def __post_init__(self):
            super().__post_init__()
            self.epsilon_high = 0.2

    monkeypatch.setattr(grpo_config, "GRPOConfig", Drifted)
    with pytest.raises(RuntimeError, match=r"GRPOConfig.epsilon_high=0.2: 0.28 was requested"):
        make_po_config("dapo", **on_cpu(tmp_path))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Compare the presets with their checked-in dump, or rewrite it.")
    parser.add_argument("--write", action="store_true")
    with tempfile.TemporaryDirectory() as scratch:
        text = dump(scratch)
    if parser.parse_args().write:
        GOLDEN.write_text(text)
    sys.exit(GOLDEN.read_text() != text)
