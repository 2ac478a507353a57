"""RunConfig -> the one GRPOConfig of a run, and the counts that follow from its rows."""

import dataclasses
import difflib
from pathlib import Path

import torch
from trl import GRPOConfig

from composer_rl.config import BatchPlan, ConfigError, RunConfig
from composer_rl.hardware import hardware_arguments
from composer_rl.objective import objective_arguments


def training_arguments(
    run: RunConfig, plan: BatchPlan, run_dir: Path, reward_weights: list[float], *, use_cpu: bool = False
) -> GRPOConfig:
    """Build the one GRPOConfig of a run; `use_cpu` builds it for a machine without the GPUs it asks for (dry run).

    Raises ConfigError for a key of trainer.extra that GRPOConfig does not have.
    """
    known = [field.name for field in dataclasses.fields(GRPOConfig)]
    for key in run.trainer.extra:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"trainer.extra.{key}: GRPOConfig has no such field{hint}")
    hardware = hardware_arguments(run.hardware, gpu=torch.cuda.is_available() and not use_cpu)
    budget = run.trainer
    return GRPOConfig(
        output_dir=str(run_dir),
        run_name=run.run_name,
        seed=run.seed,
        **objective_arguments(run.objective, run.kl),
        **hardware | ({"use_cpu": True} if use_cpu else {}),
        reward_weights=reward_weights,
        max_tool_calling_iterations=run.task.max_turns,
        # The batch, as planned.
        per_device_train_batch_size=plan.per_device_train_batch_size,
        per_device_eval_batch_size=plan.per_device_train_batch_size,
        gradient_accumulation_steps=plan.gradient_accumulation_steps,
        steps_per_generation=plan.steps_per_generation,
        num_generations=budget.num_generations,
        # The budget.
        max_steps=-1 if budget.max_steps is None else budget.max_steps,
        num_train_epochs=budget.num_train_epochs,
        max_completion_length=budget.max_completion_length,
        learning_rate=budget.learning_rate,
        lr_scheduler_type=budget.lr_scheduler_type,
        warmup_steps=budget.warmup_steps,
        optim=budget.optim,
        adam_beta1=budget.adam_beta1,
        adam_beta2=budget.adam_beta2,
        adam_epsilon=budget.adam_epsilon,
        weight_decay=budget.weight_decay,
        max_grad_norm=budget.max_grad_norm,
        disable_dropout=budget.disable_dropout,
        cast_lm_head_to_fp32=budget.cast_lm_head_to_fp32,
        # Sampling.
        temperature=run.generation.temperature,
        top_p=run.generation.top_p,
        top_k=run.generation.top_k,
        min_p=run.generation.min_p,
        repetition_penalty=run.generation.repetition_penalty,
        trust_remote_code=run.model.trust_remote_code,
        # Cadences; held-out evaluation and saving are ours.
        logging_steps=budget.logging_steps,
        # A filtered NaN would be logged as a loss of 0.
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to=run.tracking.report_to or "none",
        disable_tqdm=True,
        **run.trainer.extra,
    )


def require_rows(count: int, plan: BatchPlan) -> None:
    """Raise ConfigError when the train rows do not fill one generation."""
    if count < plan.prompts_per_generation:
        raise ConfigError(
            f"task.train: {count} rows, but one generation of {plan.generation_batch_size} rollouts takes"
            f" {plan.prompts_per_generation} prompts; add rows or lower trainer.generation_batch_size"
        )


def planned_steps(rows: int, plan: BatchPlan, run: RunConfig) -> int:
    """Return the optimizer steps of num_train_epochs over `rows` prompts; rows that fill no generation are unused."""
    return int(rows // plan.prompts_per_generation * plan.updates * run.trainer.num_train_epochs)
