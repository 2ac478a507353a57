"""RunConfig -> the one GRPOConfig of a run, and the counts that follow from its rows."""

import dataclasses
import difflib
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from trl import GRPOConfig

from composer_rl.channels.replay import ReplayChannel, ReplayConfig
from composer_rl.channels.sdpo import ColumnHints, HintSource, PeerHints, RuleHints
from composer_rl.config import BatchPlan, ConfigError, KLPlacement, RunConfig, SDPOHints
from composer_rl.hardware import hardware_arguments
from composer_rl.model import rollout_chat_template
from composer_rl.objective import objective_arguments
from composer_rl.task.load import Task, environment_tools, tool_names


def training_arguments(
    run: RunConfig, plan: BatchPlan, run_dir: Path, reward_weights: list[float], *, use_cpu: bool = False
) -> GRPOConfig:
    """Build the one GRPOConfig of a run; `use_cpu` builds it for a machine without the GPUs it asks for (dry run).

    Raises ConfigError for a key of trainer.extra that GRPOConfig does not have, and for a value it refuses.
    """
    known = [field.name for field in dataclasses.fields(GRPOConfig)]
    for key in run.trainer.extra:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"trainer.extra.{key}: GRPOConfig has no such field{hint}")
    hardware = hardware_arguments(run.hardware, gpu=torch.cuda.is_available() and not use_cpu)
    budget = run.trainer
    arguments: dict[str, Any] = dict(
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
    try:
        return GRPOConfig(**arguments)
    except ValueError as error:
        # A name that only transformers knows, such as a scheduler's or an optimizer's.
        raise ConfigError(f"GRPOConfig: {str(error).splitlines()[0]}") from error


def signal_arguments(run: RunConfig, task: Task, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return ComposerTrainer's arguments beyond GRPOTrainer's.

    Raises ConfigError for a hint column the rows lack and for a pairs file without a usable pair.
    """
    channels = run.channels
    hints: HintSource | None = None
    if channels.alpha_sdpo > 0:
        hints = hint_source(run, task)
    replay = None
    if channels.beta_replay > 0:
        assert run.task.replay_pairs is not None
        replay = ReplayChannel.from_file(
            run.task.replay_pairs,
            tokenizer,
            ReplayConfig(
                loss=channels.replay_loss.value,
                flip_rate=channels.replay_flip_rate,
                sft_weight=channels.replay_sft_weight,
                batch_size=channels.replay_batch_size,
            ),
            seed=run.seed,
            max_length=channels.replay_max_length,
            tools=environment_tools(task.environment, task.train_rows[0]),
            chat_template=rollout_chat_template(tokenizer, tools=task.environment is not None),
        )
    return {
        "error_pattern": run.task.error_pattern,
        "alpha_sdpo": channels.alpha_sdpo,
        "beta_replay": channels.beta_replay,
        "sdpo_jsd_beta": channels.sdpo_jsd_beta,
        "sdpo_temperature": channels.sdpo_temperature,
        "sdpo_token_clip": channels.sdpo_token_clip,
        "sdpo_is_clip": channels.sdpo_is_clip,
        "sdpo_teacher": channels.sdpo_teacher.value,
        "sdpo_teacher_ema_rate": channels.sdpo_teacher_ema_rate,
        "sdpo_max_turns_per_rollout": channels.sdpo_max_turns_per_rollout,
        "sdpo_max_length": channels.sdpo_max_length,
        "sdpo_success_threshold": channels.sdpo_success_threshold,
        "strict_sdpo_alignment": channels.strict_sdpo_alignment,
        "hints": hints,
        "replay_dpo_beta": channels.replay_dpo_beta,
        "replay": replay,
        "kl_in_reward": run.kl.placement == KLPlacement.reward,
        "kl_estimator": run.kl.estimator.value,
        "kl_reward_scaling": run.kl.reward_scaling.value,
    }


def hint_source(run: RunConfig, task: Task) -> HintSource:
    """Return the hint source that channels.sdpo_hints names."""
    if run.channels.sdpo_hints == SDPOHints.peer:
        return PeerHints()
    if run.channels.sdpo_hints == SDPOHints.column:
        if "hint" not in task.train_rows[0]:
            raise ConfigError(
                f"channels.sdpo_hints=column: the train rows have no column hint; they have"
                f" {', '.join(task.train_rows[0])}"
            )
        return ColumnHints()
    return RuleHints([(rule.pattern, rule.hint) for rule in run.task.hints], tools=tool_names(task.environment))


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
