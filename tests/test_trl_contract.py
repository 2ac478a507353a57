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
from transformers import AutoModelForCausalLM, GenerationMixin, LogitsProcessorList
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import (
    add_response_schema,
    get_training_chat_template,
    is_chat_template_prefix_preserving,
    supports_tool_calling,
)
from trl.kernels.chunked_divergence import ChunkedDivergenceFunction
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import (
    add_fused_lm_head,
    maybe_gather_lm_head_ctx,
    nanstd,
    shuffle_sequence_dict,
    split_tensor_dict,
    use_adapter,
)

from composer_rl.config import PACKAGE_DIR, ObjectiveConfig, config_dir
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
    "training_step": "self, model, inputs, num_items_in_batch",
}

# What we import or call of TRL and transformers beside the trainer; some of it they call private.
FUNCTIONS = {
    ChunkedDivergenceFunction.forward: (
        "ctx, student_hidden, student_weight, student_bias, teacher_hidden, teacher_weight, teacher_bias, beta,"
        " temperature=1.0, student_logit_scale=1.0, student_final_logit_softcapping=None, teacher_logit_scale=1.0,"
        " teacher_final_logit_softcapping=None"
    ),
    add_fused_lm_head: "model, temperature=1.0, cast_lm_head_to_fp32=False, outputs=('log_probs',)",
    add_response_schema: "processing_class",
    disable_gradient_checkpointing: "model, gradient_checkpointing_kwargs=None",
    get_training_chat_template: "processing_class=None, tokenizer=None",
    is_chat_template_prefix_preserving: "processing_class",
    maybe_gather_lm_head_ctx: "*params",
    nanstd: "tensor, dim=None, keepdim=False",
    shuffle_sequence_dict: "seq_dict",
    split_tensor_dict: "tensor_dict, num_chunks",
    supports_tool_calling: "processing_class",
    use_adapter: "model, adapter_name",
}

ATTRIBUTES = (
    "_buffered_inputs",
    "_environment_pool",
    "_logs",
    "_metrics",
    "_pending_extra_logs",
    "_pending_metrics",
    "_step",
    "_tokenizer",
    "async_loop",
    "beta",
    "chat_template",
    "chat_template_kwargs",
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
    "temperature",
    "tools",
    "use_transformers_continuous_batching",
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


def signature_of(function):
    return ", ".join(
        ("*" if parameter.kind is parameter.VAR_POSITIONAL else "")
        + (parameter.name if parameter.default is parameter.empty else f"{parameter.name}={parameter.default!r}")
        for parameter in inspect.signature(function).parameters.values()
    )


def test_the_installed_trl_is_the_pinned_minor_version():
    assert trl.__version__.rpartition(".")[0] == PINNED.rpartition(".")[0], broken("trl.__version__")


@pytest.mark.parametrize("method", SIGNATURES)
def test_a_method_of_grpo_trainer_has_the_signature_we_override_or_call(method):
    assert hasattr(GRPOTrainer, method), broken(f"GRPOTrainer.{method} is gone")
    signature = signature_of(getattr(GRPOTrainer, method))
    assert signature == SIGNATURES[method], broken(f"GRPOTrainer.{method}({signature})")


def test_per_token_logps_come_with_entropies_and_the_auxiliary_loss():
    method = inspect.unwrap(GRPOTrainer._get_per_token_logps_and_entropies)
    returned = typing.get_type_hints(method)["return"]
    assert returned == tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None], broken(
        f"GRPOTrainer._get_per_token_logps_and_entropies -> {returned}"
    )


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__qualname__)
def test_a_function_has_the_signature_we_call(function):
    signature = signature_of(function)
    assert signature == FUNCTIONS[function], broken(f"{function.__qualname__}({signature})")


def test_a_generation_is_returned_as_the_tuple_that_we_keep_the_first_four_of():
    returned = [n.value for n in ast.walk(source(GRPOTrainer._generate)) if isinstance(n, ast.Return)]
    names = "prompt_ids, completion_ids, tool_mask, completions, logprobs, extra_fields, images, tool_images"
    assert [ast.unparse(value).strip("()") for value in returned] == [names], broken("GRPOTrainer._generate's tuple")


def test_a_generation_is_buffered_by_micro_batch_and_counted_by_step():
    prepare = ast.unparse(source(GRPOTrainer._prepare_inputs))
    for line in (
        "generation_batch = self._generate_and_score_completions(generation_batch)",
        "generation_batch = shuffle_sequence_dict(generation_batch)",
        "generation_batches = split_tensor_dict(generation_batch, self.args.steps_per_generation)",
        "self._buffered_inputs = [",
        "inputs = self._buffered_inputs[self._step % self.args.steps_per_generation]",
    ):
        assert line in prepare, broken(f"GRPOTrainer._prepare_inputs: `{line}`")
    assert "self._step += 1" in ast.unparse(source(GRPOTrainer.training_step)), broken("GRPOTrainer.training_step")


def test_the_loss_is_the_one_forward_of_per_token_logps_and_reads_beta_when_called():
    loss = source(GRPOTrainer._compute_loss)
    calls = [ast.unparse(n.func) for n in ast.walk(loss) if isinstance(n, ast.Call)]
    forwards = [call for call in calls if call in ("model", "self._get_per_token_logps_and_entropies")]
    assert forwards == ["self._get_per_token_logps_and_entropies"], broken(
        f"GRPOTrainer._compute_loss calls {forwards}"
    )
    assert "if self.beta != 0.0" in ast.unparse(loss), broken("GRPOTrainer._compute_loss no longer reads self.beta")
    assert "self._compute_loss(model, inputs)" in ast.unparse(source(GRPOTrainer.compute_loss)), broken(
        "GRPOTrainer.compute_loss no longer calls _compute_loss"
    )


def test_what_reward_functions_log_waits_in_the_pending_attributes_until_it_is_scored():
    scored = ast.unparse(source(GRPOTrainer._generate_and_score_completions))
    for attribute in ("_pending_metrics", "_pending_extra_logs"):
        assert f"self.{attribute}.clear()" in scored, broken(f"GRPOTrainer.{attribute} is no longer emptied by scoring")
    assert "pool = self._environment_pool[name]" in scored, broken(
        "GRPOTrainer._environment_pool is no longer drawn from"
    )


def test_the_fused_head_gives_tempered_log_probs_where_there_is_a_label_and_0_elsewhere():
    model = AutoModelForCausalLM.from_pretrained(PACKAGE_DIR / "assets" / "tiny", dtype=torch.float32)
    ids = torch.arange(5, 25).view(2, 10)
    mask = torch.ones_like(ids)
    labels = ids.masked_fill(torch.arange(10) < 4, -100)
    with torch.no_grad():
        expected = torch.log_softmax(model(input_ids=ids, attention_mask=mask).logits[:, :-1] / 0.7, dim=-1)
        add_fused_lm_head(model, temperature=0.7)
        output = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
    expected = expected.gather(2, ids[:, 1:, None])[..., 0].masked_fill(labels[:, 1:] == -100, 0.0)
    assert torch.allclose(output.log_probs, expected, atol=1e-4), broken("add_fused_lm_head(fused_lm_head=, labels=)")


def test_the_divergence_kernel_returns_the_divergence_and_the_students_entropy_and_teaches_the_student_only():
    torch.manual_seed(0)
    student, head_s, teacher, head_t = (torch.randn(n, 4, requires_grad=True) for n in (3, 7, 3, 7))
    divergence, entropy = ChunkedDivergenceFunction.apply(
        student, head_s, None, teacher, head_t, None, 0.0, 0.7, 2.0, None, 0.5, None
    )
    logp_s = torch.log_softmax(student @ head_s.T * 2.0 / 0.7, dim=-1)
    logp_t = torch.log_softmax(teacher @ head_t.T * 0.5 / 0.7, dim=-1)
    message = broken("ChunkedDivergenceFunction.apply")
    assert torch.allclose(divergence, (logp_t.exp() * (logp_t - logp_s)).sum(-1), atol=1e-5), message
    assert torch.allclose(entropy, -(logp_s.exp() * logp_s).sum(-1), atol=1e-5), message
    divergence.sum().backward()
    assert student.grad is not None and head_s.grad is not None, message
    assert teacher.grad is None and head_t.grad is None, message


def test_nanstd_is_bessel_corrected_and_leaves_nan_out():
    values = torch.tensor([[1.0, float("nan"), 3.0], [2.0, 2.0, 2.0]])
    assert nanstd(values, dim=1).tolist() == pytest.approx([2**0.5, 0.0]), broken("nanstd")


def test_gradient_checkpointing_is_off_inside_the_block_and_back_after_it():
    model = AutoModelForCausalLM.from_pretrained(PACKAGE_DIR / "assets" / "tiny")
    model.gradient_checkpointing_enable()
    with disable_gradient_checkpointing(model, None):
        assert not model.is_gradient_checkpointing, broken("disable_gradient_checkpointing")
    assert model.is_gradient_checkpointing, broken("disable_gradient_checkpointing")


def test_generate_asks_the_model_itself_for_its_logits_processors():
    """Held-out sampling sets the method on the instance, and gets what the class would have returned."""
    assert "self._get_logits_processor(" in inspect.getsource(GenerationMixin.generate), broken(
        "transformers' generate no longer calls self._get_logits_processor"
    )
    returned = inspect.signature(GenerationMixin._get_logits_processor).return_annotation
    assert returned is LogitsProcessorList, broken(f"transformers' _get_logits_processor -> {returned}")


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
    assigned = [n for n in ast.walk(source(GRPOTrainer._generate_and_score_completions)) if isinstance(n, ast.Assign)]
    returned = set()
    for node in assigned:
        target = ast.unparse(node.targets[0])
        if target == "output" and isinstance(node.value, ast.Dict):
            returned.update(ast.literal_eval(name) for name in node.value.keys)
        elif target.startswith("output["):
            returned.add(ast.literal_eval(node.targets[0].slice))
    assert key in returned, broken(f"GRPOTrainer._generate_and_score_completions returns no {key}")


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
