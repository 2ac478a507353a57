"""The policy and its tokenizer, checked before any weight is loaded."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from trl.chat_template_utils import (
    add_response_schema,
    get_training_chat_template,
    is_chat_template_prefix_preserving,
    supports_tool_calling,
)

from composer_rl.config import ConfigError, ModelConfig


def load_tokenizer(model: ModelConfig, *, tools: bool) -> PreTrainedTokenizerBase:
    """Load the tokenizer with a pad token and, when the task has `tools`, a template that can parse tool calls.

    Raises ConfigError when the folder is not a model, when there is no chat template, or when the template
    cannot render or parse tool calls.
    """
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            model.path, trust_remote_code=model.trust_remote_code, padding_side="left", truncation_side="left"
        )
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"model.path={model.path}: no tokenizer could be loaded ({reason})") from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.chat_template is None:
        raise ConfigError(f"model.path={model.path}: the tokenizer has no chat template, and the prompts are chats")
    if tools:
        if not supports_tool_calling(tokenizer):
            raise ConfigError(f"model.path={model.path}: its chat template does not render tool calls")
        if getattr(tokenizer, "response_template", None) is None:
            try:
                tokenizer = add_response_schema(tokenizer)
            except ValueError:
                raise ConfigError(
                    f"model.path={model.path}: TRL does not know how to parse tool calls of its chat template;"
                    " set tokenizer.response_template and save the tokenizer"
                ) from None
    return tokenizer


def rollout_chat_template(tokenizer: PreTrainedTokenizerBase, *, tools: bool) -> str | None:
    """Return the template GRPOTrainer renders rollouts with; None = the tokenizer's own.

    With tools it puts TRL's training template in the place of one that rewrites earlier turns.
    """
    if tools and not is_chat_template_prefix_preserving(tokenizer):
        return get_training_chat_template(tokenizer)
    return None


def load_policy(model: ModelConfig) -> PreTrainedModel:
    """Load the policy's weights in model.dtype on the CPU; the trainer places them."""
    return AutoModelForCausalLM.from_pretrained(model.path, **policy_arguments(model))


def policy_arguments(model: ModelConfig) -> dict[str, Any]:
    """Return from_pretrained's keyword arguments for the policy and for its reference copy."""
    return {
        "dtype": getattr(torch, model.dtype.value),
        "attn_implementation": model.attn_implementation,
        "trust_remote_code": model.trust_remote_code,
    }


def count_parameters(model: ModelConfig) -> int:
    """Return the number of parameters of the policy without loading its weights.

    Raises ConfigError when the folder holds no causal language model.
    """
    if not (Path(model.path) / "config.json").is_file() and Path(model.path).exists():
        raise ConfigError(f"model.path={model.path}: holds no config.json")
    try:
        config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path={model.path}: {str(error).strip().splitlines()[0]}") from error
    with torch.device("meta"):
        policy = AutoModelForCausalLM.from_config(config, trust_remote_code=model.trust_remote_code)
    return sum(parameter.numel() for parameter in policy.parameters())
