"""What composer-rl relies on in the pinned TRL: a move there fails here by name."""

import ast
import dataclasses
import inspect
import textwrap
import typing

import pytest
import torch
import trl
from omegaconf import OmegaConf
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import shuffle_sequence_dict, split_tensor_dict

from composer_rl.config import ObjectiveConfig, config_dir
from composer_rl.objective import objective_arguments

PINNED = "1.16.0"

SIGNATURES = {
    "_calculate_rewards": "self, inputs, prompts, completions, completion_ids_list",
    "_compute_loss": "self, model, inputs",
    "_generate": "self, prompts",
    "_generate_and_score_completions": "self, inputs",
    "_generate_single_turn": "self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False",
    "_get_per_token_logps_and_entropies": (
        "self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, compute_entropy=False,"
        " compute_aux_loss=False, pixel_values=None, image_grid_thw=None, num_images=None,"
        " pixel_attention_mask=None, spatial_shapes=None, num_tiles=None, image_sizes=None, token_type_ids=None,"
        " mm_token_type_ids=None, image_position_ids=None"
    ),
    "_get_train_sampler": "self, dataset=None",
    "_prepare_inputs": "self, generation_batch",
    "_save_checkpoint": "self, model, trial",
    "_tool_call_loop": ("self, prompts, prompt_ids, completion_ids, completions, logprobs, images, multimodal_fields"),
    "compute_loss": "self, model, inputs, return_outputs=False, num_items_in_batch=None",
    "log": "self, logs, start_time=None",
}

ATTRIBUTES = (
    "_buffered_inputs",
    "_logs",
    "_metrics",
    "_pending_extra_logs",
    "_pending_metrics",
    "_step",
    "async_loop",
    "beta",
    "environments",
    "epsilon_high",
    "epsilon_low",
    "loss_type",
    "num_generations",
    "num_iterations",
    "ref_model",
    "reward_funcs",
    "reward_weights",
    "scale_rewards",
    "use_vllm",
)

BATCH_KEYS = {
    "advantages",
    "completion_ids",
    "completion_mask",
    "num_items_in_batch",
    "old_per_token_logps",
    "prompt_ids",
    "prompt_mask",
    "ref_per_token_logps",
    "tool_mask",
}


def broken(what):
    return f"{what}: composer-rl relies on it as in TRL {PINNED}, installed is {trl.__version__}"


def source(method):
    return ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(method))))


def test_the_installed_trl_is_the_pinned_minor_version():
    assert trl.__version__.rpartition(".")[0] == PINNED.rpartition(".")[0], broken("trl.__version__")


@pytest.mark.parametrize("method", SIGNATURES)
def test_a_method_of_grpo_trainer_has_the_signature_we_override_or_call(method):
    assert hasattr(GRPOTrainer, method), broken(f"GRPOTrainer.{method} is gone")
    parameters = inspect.signature(getattr(GRPOTrainer, method)).parameters.values()
    signature = ", ".join(
        parameter.name if parameter.default is parameter.empty else f"{parameter.name}={parameter.default!r}"
        for parameter in parameters
    )
    assert signature == SIGNATURES[method], broken(f"GRPOTrainer.{method}({signature})")


def test_per_token_logps_come_with_entropies_and_the_auxiliary_loss():
    method = inspect.unwrap(GRPOTrainer._get_per_token_logps_and_entropies)
    returned = typing.get_type_hints(method)["return"]
    assert returned == tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None], broken(
        f"GRPOTrainer._get_per_token_logps_and_entropies -> {returned}"
    )


@pytest.mark.parametrize("attribute", ATTRIBUTES)
def test_grpo_trainer_sets_an_attribute_we_read(attribute):
    stored = {
        node.attr
        for node in ast.walk(source(GRPOTrainer.__init__))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    assert attribute in stored, broken(f"GRPOTrainer.{attribute} is not set in __init__")


def test_trl_divides_the_loss_by_the_accumulation_steps_itself():
    stored = [node for node in ast.walk(source(GRPOTrainer)) if isinstance(node, ast.Assign)]
    values = [
        ast.literal_eval(node.value)
        for node in stored
        for target in node.targets
        if ast.unparse(target).removeprefix("self.") == "loss_is_scaled_for_ga"
    ]
    assert values == [True], broken(f"GRPOTrainer.loss_is_scaled_for_ga is {values}")
    read = {n.attr for n in ast.walk(source(GRPOTrainer._compute_loss)) if isinstance(n, ast.Attribute)}
    assert "current_gradient_accumulation_steps" in read, broken(
        "GRPOTrainer._compute_loss no longer reads current_gradient_accumulation_steps"
    )


def test_metrics_are_lists_per_mode_that_log_averages_and_clears():
    log = ast.unparse(source(GRPOTrainer.log))
    assert "self._metrics[mode].clear()" in log, broken("GRPOTrainer.log no longer clears _metrics[mode]")
    init = ast.unparse(source(GRPOTrainer.__init__))
    metrics = "self._metrics = {'train': defaultdict(list), 'eval': defaultdict(list)}"
    assert metrics in init, broken("GRPOTrainer._metrics is no longer {'train': lists, 'eval': lists}")


def test_logs_hold_one_column_per_rollout_field():
    (logs,) = (
        node.value
        for node in ast.walk(source(GRPOTrainer.__init__))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "self._logs"
    )
    columns = {ast.literal_eval(key) for key in logs.keys}
    assert {"prompt", "completion", "rewards", "advantages"} <= columns, broken(f"GRPOTrainer._logs has {columns}")


@pytest.mark.parametrize("key", sorted(BATCH_KEYS))
def test_scored_completions_carry_a_key_we_read(key):
    text = {
        n.value for n in ast.walk(source(GRPOTrainer._generate_and_score_completions)) if isinstance(n, ast.Constant)
    }
    assert key in text, broken(f"GRPOTrainer._generate_and_score_completions returns no {key}")


def test_what_we_add_to_the_batch_stays_with_its_row_through_shuffle_and_split():
    batch = {"completion_ids": torch.arange(8).view(4, 2), "ours": torch.arange(4), "names": list("abcd")}
    halves = split_tensor_dict(shuffle_sequence_dict(batch), 2)
    for half in halves:
        rows = (half["completion_ids"][:, 0] // 2).tolist()
        assert half["ours"].tolist() == rows, broken("shuffle_sequence_dict, split_tensor_dict on tensors")
        assert half["names"] == ["abcd"[row] for row in rows], broken("the same on lists")
    assert sorted(row for half in halves for row in half["ours"].tolist()) == [0, 1, 2, 3]


def test_every_argument_of_an_objective_is_a_grpo_config_field():
    values = OmegaConf.load(config_dir() / "objective" / "dr_grpo.yaml")
    objective = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ObjectiveConfig), values))
    known = {field.name for field in dataclasses.fields(GRPOConfig)}
    missing = {"steps_per_generation", *objective_arguments(objective, objective.published_kl)} - known
    assert not missing, broken(f"GRPOConfig.{', '.join(sorted(missing))} is gone")
