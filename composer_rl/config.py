"""The schema of a run: one dataclass per config group, strict loading, and the batch arithmetic.

Schema fields have no defaults: every preset under conf/ states every knob, so the YAML is the one place to
read a value. Nothing here imports torch.
"""

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

PACKAGE_DIR = Path(__file__).parent


class ConfigError(ValueError):
    """A mistake in the configuration: one line that names the key, the value and what to do (exit code 2)."""


def config_dir() -> Path:
    """Return the folder of YAML presets: inside the package when installed, beside it in a checkout."""
    packaged = PACKAGE_DIR / "conf"
    return packaged if (packaged / "config.yaml").is_file() else PACKAGE_DIR.parent / "conf"


def register_schema() -> None:
    """Register what the YAML relies on: the schema `run_schema` and the resolvers `asset` and `times`.

    ${asset:NAME} is a file or folder that ships with the package; ${times:A,B} is a product.
    """
    ConfigStore.instance().store(name="run_schema", node=RunConfig)
    OmegaConf.register_new_resolver("asset", lambda name: str(PACKAGE_DIR / "assets" / name), replace=True)
    OmegaConf.register_new_resolver("times", lambda a, b: a * b, replace=True)


def require(holds: bool, key: str, value: object, rule: str) -> None:
    """Raise ConfigError `key=value: rule` unless `holds`."""
    if not holds:
        raise ConfigError(f"{key}={value}: {rule}")


def require_range(
    section: str, config: object, names: str, low: float, high: float = math.inf, *, open_low: bool = False
) -> None:
    """Require each named number (None is allowed) to lie in [low, high], or (low, high] with `open_low`."""
    bounds = f"must be {'above' if open_low else 'at least'} {low:g}"
    if high < math.inf:
        bounds += f" and at most {high:g}"
    for name in names.split():
        value = vars(config)[name]
        if value is not None:
            above = value > low if open_low else value >= low
            require(math.isfinite(value) and above and value <= high, f"{section}.{name}", value, bounds)


# OmegaConf matches enum members by name, so a member's name is its YAML spelling.
class LossType(str, Enum):
    grpo = "grpo"
    bnpo = "bnpo"
    dr_grpo = "dr_grpo"
    dapo = "dapo"
    cispo = "cispo"
    sapo = "sapo"


class RatioLevel(str, Enum):
    token = "token"
    sequence = "sequence"


class ScaleRewards(str, Enum):
    group = "group"
    batch = "batch"
    none = "none"


class Aggregation(str, Enum):
    sum_then_normalize = "sum_then_normalize"
    normalize_then_sum = "normalize_then_sum"


class Reproduces(str, Enum):
    full = "full"
    loss_only = "loss_only"
    partial = "partial"


class KLPlacement(str, Enum):
    none = "none"
    loss = "loss"
    reward = "reward"


class KLEstimator(str, Enum):
    k1 = "k1"
    k3 = "k3"


class RewardScaling(str, Enum):
    none = "none"
    raw_std = "raw_std"


class SDPOTeacher(str, Enum):
    ema = "ema"
    frozen = "frozen"
    live = "live"


class SDPOHints(str, Enum):
    rules = "rules"
    column = "column"
    peer = "peer"


class ReplayLoss(str, Enum):
    sigmoid = "sigmoid"
    ipo = "ipo"
    robust = "robust"


class Device(str, Enum):
    auto = "auto"
    cpu = "cpu"


class Precision(str, Enum):
    auto = "auto"
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class Dtype(str, Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class CorrectionMode(str, Enum):
    token_truncate = "token_truncate"
    token_mask = "token_mask"
    sequence_truncate = "sequence_truncate"
    sequence_mask = "sequence_mask"


@dataclass
class KLConfig:
    """Where the KL to the reference policy enters, and how strongly."""

    placement: KLPlacement = MISSING
    # Reward units per nat: of each token in the loss, of the whole sequence in the reward. 0 exactly with none.
    coef: float = MISSING
    # Of log ratios of single tokens; TRL's loss has k3, and k3 in the reward is a negative control.
    estimator: KLEstimator = MISSING
    # raw_std = advantages of the shaped reward divided by the raw reward's standard deviation.
    reward_scaling: RewardScaling = MISSING
    # Multiply k3 in the loss by the importance ratio (DeepSeek-V3.2, arXiv:2512.02556).
    use_bias_correction_kl: bool = MISSING

    def __post_init__(self) -> None:
        require_range("kl", self, "coef", 0.0)
        placement = self.placement.value
        idle = f"has no effect with kl.placement={placement}"
        if self.placement == KLPlacement.none:
            require(self.coef == 0, "kl.coef", self.coef, f"{idle}; use kl=loss or kl=reward")
            require(self.estimator == KLEstimator.k1, "kl.estimator", self.estimator.value, f"{idle}; use kl=reward")
        else:
            rule = f"must be above 0 with kl.placement={placement}; or use kl=none"
            require(self.coef > 0, "kl.coef", self.coef, rule)
        if self.placement == KLPlacement.loss:
            require(
                self.estimator == KLEstimator.k3,
                "kl.estimator",
                self.estimator.value,
                "TRL's KL in the loss is k3, and k1 there has no gradient on average; use kl=reward for k1",
            )
        else:
            require(not self.use_bias_correction_kl, "kl.use_bias_correction_kl", True, f"{idle}; use kl=loss")
        if self.placement != KLPlacement.reward:
            require(
                self.reward_scaling == RewardScaling.none,
                "kl.reward_scaling",
                self.reward_scaling.value,
                f"{idle}; use kl=reward",
            )


def require_kl_in_reward(objective: Any, reward_scaling: str, *, section: str, kl_section: str) -> None:
    """Require an objective under which R - coef K is compared within groups as it stands, or by the raw deviation.

    `objective` has GRPOConfig's field names, an ObjectiveConfig or a GRPOConfig; the prefixes name its keys and the
    KL's in the message. Raises ConfigError with the override that works.
    """
    scale = ScaleRewards(objective.scale_rewards)
    aggregation = Aggregation(objective.multi_objective_aggregation)
    require(
        aggregation == Aggregation.sum_then_normalize,
        f"{section}multi_objective_aggregation",
        aggregation.value,
        "scales each reward before there is a sum to take the KL from;"
        f" use {section}multi_objective_aggregation=sum_then_normalize",
    )
    if reward_scaling == RewardScaling.none:
        require(
            scale == ScaleRewards.none,
            f"{section}scale_rewards",
            scale.value,
            "a KL in the reward changes the standard deviation it would be divided by, and in a group of equal"
            f" rewards its coefficient cancels; use {section}scale_rewards=none, or divide by the raw reward's with"
            f" {kl_section}reward_scaling=raw_std",
        )
    else:
        require(
            scale != ScaleRewards.none,
            f"{kl_section}reward_scaling",
            RewardScaling(reward_scaling).value,
            f"has no effect with {section}scale_rewards=none; use {kl_section}reward_scaling=none",
        )
    require(
        not objective.mask_truncated_completions,
        f"{section}mask_truncated_completions",
        True,
        "truncated rollouts would count in their group's mean without their KL;"
        f" use {section}mask_truncated_completions=false",
    )


def kl_in_reward_warnings(objective: Any, estimator: str, *, section: str, kl_section: str) -> list[str]:
    """Return what keeps a KL in the reward from optimising reward minus coef KL; arguments as require_kl_in_reward."""
    notes = []
    if objective.loss_type in ("grpo", "bnpo", "sapo"):
        notes.append(
            f"{section}loss_type={LossType(objective.loss_type).value}: divides by length, so the KL in the reward is"
            f" weaker on long rollouts and is not the gradient of one KL; {section}loss_type=dr_grpo is exact"
        )
    if estimator == KLEstimator.k3:
        notes.append(
            f"{kl_section}estimator=k3: an experiment, a negative control; its gradient in the reward is not the KL's"
            f" and mostly cancels (arXiv:2512.21852); use {kl_section}estimator=k1"
        )
    return notes


@dataclass
class ObjectiveConfig:
    """The policy loss: every algorithm field that TRL defaults, under TRL's names (algorithm presets)."""

    name: str = MISSING
    # How much of the published method the preset gives: its whole recipe, its loss only, or part of its loss.
    reproduces: Reproduces = MISSING
    loss_type: LossType = MISSING
    importance_sampling_level: RatioLevel = MISSING
    epsilon: float = MISSING
    # Upper clip; for cispo TRL reads it as the absolute cap of the ratio. null = epsilon.
    epsilon_high: float | None = MISSING
    # Upper bound of the ratio for negative advantages (INTELLECT-2); null = none.
    delta: float | None = MISSING
    scale_rewards: ScaleRewards = MISSING
    multi_objective_aggregation: Aggregation = MISSING
    mask_truncated_completions: bool = MISSING
    # Optimizer updates that share one generation of rollouts (mini-batches), per pass over them.
    updates_per_generation: int = MISSING
    # Passes over one generation of rollouts.
    num_iterations: int = MISSING
    top_entropy_quantile: float = MISSING
    entropy_coef: float = MISSING
    use_adaptive_entropy: bool = MISSING
    entropy_coef_min: float = MISSING
    entropy_coef_max: float = MISSING
    entropy_coef_delta: float = MISSING
    entropy_target: float = MISSING
    off_policy_mask_threshold: float | None = MISSING
    sapo_temperature_pos: float = MISSING
    sapo_temperature_neg: float = MISSING
    vllm_importance_sampling_correction: bool = MISSING
    vllm_importance_sampling_mode: CorrectionMode = MISSING
    vllm_importance_sampling_clip_max: float | None = MISSING
    vllm_importance_sampling_clip_min: float | None = MISSING
    published_kl: KLConfig = MISSING

    @property
    def uses_ratio(self) -> bool:
        """Whether the method differs from plain policy gradient only once the ratio leaves 1 (algorithms.md 0.2)."""
        return (
            self.importance_sampling_level == RatioLevel.sequence
            or self.loss_type in (LossType.cispo, LossType.sapo)
            or self.epsilon_high not in (None, self.epsilon)
            or self.delta is not None
        )

    def __post_init__(self) -> None:
        def section(names: str, low: float, high: float = math.inf, *, open_low: bool = False) -> None:
            require_range("objective", self, names, low, high, open_low=open_low)

        section("epsilon epsilon_high delta", 0.0, open_low=True)
        section("updates_per_generation num_iterations", 1)
        section("top_entropy_quantile", 0.0, 1.0, open_low=True)
        section("entropy_coef entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target", 0.0)
        section("off_policy_mask_threshold", 0.0, open_low=True)
        section("sapo_temperature_pos sapo_temperature_neg", 0.0, open_low=True)
        section("vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min", 0.0, open_low=True)

        sequence_level = self.importance_sampling_level == RatioLevel.sequence
        if self.loss_type == LossType.cispo:
            require(
                self.epsilon_high is not None and self.epsilon_high > 1,
                "objective.epsilon_high",
                self.epsilon_high,
                "cispo reads it as the absolute cap of the ratio and needs more than 1, e.g. 5.0",
            )
        if sequence_level:
            # TRL only warns (GRPOTrainer.__init__), but the sum over tokens weighs each sequence by its length.
            require(
                self.loss_type == LossType.grpo,
                "objective.importance_sampling_level",
                "sequence",
                f"needs the sequence-mean loss_type=grpo, not {self.loss_type.value}; use objective=gspo",
            )
        require(
            not (self.name == "gspo" and not sequence_level),
            "objective.importance_sampling_level",
            self.importance_sampling_level.value,
            "gspo is defined at sequence level; for a token-level ratio use objective=grpo",
        )
        if self.delta is not None:
            upper = self.epsilon if self.epsilon_high is None else self.epsilon_high
            require(
                self.delta > 1 + upper,
                "objective.delta",
                self.delta,
                f"must exceed 1 + epsilon_high = {1 + upper:g}, or the ordinary clip never acts",
            )
            require(
                self.loss_type not in (LossType.cispo, LossType.sapo),
                "objective.delta",
                self.delta,
                f"has no effect with loss_type={self.loss_type.value}; set it to null",
            )
        require(
            self.multi_objective_aggregation != Aggregation.normalize_then_sum
            or self.scale_rewards == ScaleRewards.group,
            "objective.scale_rewards",
            self.scale_rewards.value,
            "has no effect with multi_objective_aggregation=normalize_then_sum, which always divides by the"
            " standard deviation; set scale_rewards=group",
        )
        clip_min, clip_max = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
        if clip_min is not None and clip_max is not None:
            require(
                clip_min < clip_max,
                "objective.vllm_importance_sampling_clip_min",
                clip_min,
                f"must be below vllm_importance_sampling_clip_max={clip_max:g}",
            )


@dataclass
class ChannelsConfig:
    """Learning signals beside the policy loss: self-distillation at error turns (SDPO) and preference pairs."""

    # Weights in the total loss; 0 = absent.
    alpha_sdpo: float = MISSING
    beta_replay: float = MISSING
    # 0 = KL(teacher||student), 1 = KL(student||teacher), between = generalised JSD.
    sdpo_jsd_beta: float = MISSING
    # Of both sides; null = generation.temperature.
    sdpo_temperature: float | None = MISSING
    # Cap of a token's divergence in nats; null = none.
    sdpo_token_clip: float | None = MISSING
    # Cap of the importance weight of off-policy tokens; null = no weight.
    sdpo_is_clip: float | None = MISSING
    sdpo_teacher: SDPOTeacher = MISSING
    # Weight of the student in each EMA update of the teacher.
    sdpo_teacher_ema_rate: float = MISSING
    # Error turns distilled per rollout.
    sdpo_max_turns_per_rollout: int = MISSING
    # Tokens a teacher row may have; null = the model's max_position_embeddings.
    sdpo_max_length: int | None = MISSING
    sdpo_hints: SDPOHints = MISSING
    # Reward at or above which a rollout succeeded: peers, and errors of single-turn tasks.
    sdpo_success_threshold: float = MISSING
    strict_sdpo_alignment: bool = MISSING
    # Preference loss: beta, kind, flip rate of robust, weight of the chosen side's negative log-likelihood.
    replay_dpo_beta: float = MISSING
    replay_loss: ReplayLoss = MISSING
    replay_flip_rate: float = MISSING
    replay_sft_weight: float = MISSING
    # Pairs per optimizer update, over all ranks.
    replay_batch_size: int = MISSING
    # Tokens that a pair's prompt and response may have together; a longer pair is dropped and counted.
    replay_max_length: int = MISSING

    def __post_init__(self) -> None:
        def section(names: str, low: float, high: float = math.inf, *, open_low: bool = False) -> None:
            require_range("channels", self, names, low, high, open_low=open_low)

        section("alpha_sdpo beta_replay replay_sft_weight", 0.0)
        section("sdpo_jsd_beta", 0.0, 1.0)
        section("sdpo_temperature sdpo_token_clip sdpo_is_clip replay_dpo_beta", 0.0, open_low=True)
        section("sdpo_teacher_ema_rate", 0.0, 1.0, open_low=True)
        section("sdpo_max_turns_per_rollout sdpo_max_length replay_batch_size replay_max_length", 1)
        require(math.isfinite(self.sdpo_success_threshold), "channels.sdpo_success_threshold", "inf", "must be finite")
        require(
            0 <= self.replay_flip_rate < 0.5, "channels.replay_flip_rate", self.replay_flip_rate, "must lie in [0, 0.5)"
        )
        require(
            (self.replay_loss == ReplayLoss.robust) or self.replay_flip_rate == 0,
            "channels.replay_flip_rate",
            self.replay_flip_rate,
            f"has no effect with replay_loss={self.replay_loss.value}; use channels.replay_loss=robust",
        )


@dataclass
class HardwareConfig:
    """The machine: ranks, device and arithmetic."""

    name: str = MISSING
    num_processes: int = MISSING
    device: Device = MISSING
    # Autocast dtype; auto = bf16 on a GPU, fp32 on a CPU.
    precision: Precision = MISSING
    gradient_checkpointing: bool = MISSING

    def __post_init__(self) -> None:
        require_range("hardware", self, "num_processes", 1)
        require(
            not (self.device == Device.cpu and self.precision == Precision.fp16),
            "hardware.precision",
            "fp16",
            "needs a GPU; use fp32 or bf16 with hardware.device=cpu",
        )


@dataclass
class ModelConfig:
    """The policy: where its weights are and how they are loaded."""

    name: str = MISSING
    path: str = MISSING
    # dtype of the trained weights; hardware.precision sets the dtype of the arithmetic.
    dtype: Dtype = MISSING
    attn_implementation: str = MISSING
    trust_remote_code: bool = MISSING
    # The rate these weights are trained at; trainer.learning_rate reads it.
    learning_rate: float = MISSING

    def __post_init__(self) -> None:
        require(self.path != "", "model.path", self.path, "must name a folder or a hub model")
        embedded = str(PACKAGE_DIR / "assets" / "tiny")
        require(
            self.name != "tiny" or self.path == embedded,
            "model.path",
            self.path,
            "model=tiny is the embedded policy with its own learning rate; for your own weights add model=hf",
        )


@dataclass
class RewardConfig:
    """One reward function and its weight in the sum."""

    # Dotted path of a function with TRL's reward signature.
    function: str = MISSING
    # 0 = computed and logged, never trained on.
    weight: float = MISSING
    # Keyword arguments bound to the function.
    arguments: dict[str, Any] = MISSING


@dataclass
class HintConfig:
    """One hint rule: what to tell the model when a tool error matches."""

    # Regular expression searched in the error text; named groups are available to the hint.
    pattern: str = MISSING
    # Text with {group} fields.
    hint: str = MISSING


@dataclass
class TaskConfig:
    """Rows, environment, rewards and the held-out score."""

    name: str = MISSING
    # `_target_` leaf: a callable that returns a list of rows, each with `prompt` and any further columns.
    train: dict[str, Any] = MISSING
    heldout: dict[str, Any] = MISSING
    # Dotted path of a class for TRL's environment_factory; null = single-turn.
    environment: str | None = MISSING
    # Tool-call rounds a rollout may use (TRL's max_tool_calling_iterations).
    max_turns: int = MISSING
    rewards: dict[str, RewardConfig] = MISSING
    # The reward that defines success: the held-out score is its mean over held-out prompts.
    gold: str = MISSING
    # Regular expression that marks a tool result as an error.
    error_pattern: str = MISSING
    hints: list[HintConfig] = MISSING
    # JSONL of preference pairs for the replay channel; null = none.
    replay_pairs: str | None = MISSING
    # The number of tokens a rollout may take, tool results included; trainer.max_completion_length reads it.
    max_completion_length: int = MISSING

    def __post_init__(self) -> None:
        require_range("task", self, "max_turns max_completion_length", 1)
        require(len(self.rewards) > 0, "task.rewards", "{}", "name at least one reward function")
        require(
            self.gold in self.rewards, "task.gold", self.gold, f"must be one of task.rewards: {', '.join(self.rewards)}"
        )
        for name, reward in self.rewards.items():
            require(math.isfinite(reward.weight), f"task.rewards.{name}.weight", reward.weight, "must be finite")
        require(
            any(reward.weight != 0 for reward in self.rewards.values()),
            "task.rewards",
            "all weights 0",
            "give at least one reward a weight, or nothing is trained",
        )


@dataclass
class TrainerConfig:
    """The budget: steps, batch, lengths, optimizer and cadences."""

    # Optimizer steps; null = num_train_epochs over the train rows.
    max_steps: int | None = MISSING
    num_train_epochs: float = MISSING
    # Rollouts per generation, over all ranks.
    generation_batch_size: int = MISSING
    num_generations: int = MISSING
    # Rows per device per forward, an upper bound.
    max_micro_batch_size: int = MISSING
    max_completion_length: int = MISSING
    learning_rate: float = MISSING
    lr_scheduler_type: str = MISSING
    warmup_steps: int = MISSING
    optim: str = MISSING
    adam_beta1: float = MISSING
    adam_beta2: float = MISSING
    adam_epsilon: float = MISSING
    weight_decay: float = MISSING
    max_grad_norm: float = MISSING
    disable_dropout: bool = MISSING
    cast_lm_head_to_fp32: bool = MISSING
    # Cadences in optimizer steps; 0 = only before and after the run (eval), only at its end (save).
    logging_steps: int = MISSING
    eval_steps: int = MISSING
    # Further GRPOConfig fields that no group owns.
    extra: dict[str, Any] = MISSING

    def __post_init__(self) -> None:
        def section(names: str, low: float, high: float = math.inf, *, open_low: bool = False) -> None:
            require_range("trainer", self, names, low, high, open_low=open_low)

        section("max_steps generation_batch_size max_micro_batch_size max_completion_length logging_steps", 1)
        section("num_generations", 2)
        section("num_train_epochs learning_rate adam_epsilon max_grad_norm", 0.0, open_low=True)
        section("adam_beta1 adam_beta2", 0.0, 1.0)
        section("warmup_steps weight_decay eval_steps", 0)
        require(
            self.warmup_steps == 0 or self.lr_scheduler_type != "constant",
            "trainer.warmup_steps",
            self.warmup_steps,
            "has no effect on a constant schedule; use trainer.lr_scheduler_type=constant_with_warmup",
        )
        for field in self.extra:
            owner = EXTRA_OWNERS.get(field)
            require(owner is None, f"trainer.extra.{field}", self.extra[field], f"is set by {owner}")


@dataclass
class GenerationConfig:
    """The engine that samples rollouts, and how it samples."""

    name: str = MISSING
    temperature: float = MISSING
    top_p: float = MISSING
    # 0 = off.
    top_k: int = MISSING
    min_p: float | None = MISSING
    repetition_penalty: float = MISSING

    def __post_init__(self) -> None:
        require_range("generation", self, "temperature repetition_penalty", 0.0, open_low=True)
        require_range("generation", self, "top_p", 0.0, 1.0, open_low=True)
        require_range("generation", self, "top_k", 0)
        require_range("generation", self, "min_p", 0.0, 1.0)


@dataclass
class TrackingConfig:
    """Where metrics and samples go beside the run folder."""

    name: str = MISSING
    # Names of transformers' reporting integrations.
    report_to: list[str] = MISSING
    # Write the rollouts of every logged step to completions/.
    log_completions: bool = MISSING

    def __post_init__(self) -> None:
        for tracker in self.report_to:
            require(tracker in TRACKERS, "tracking.report_to", tracker, f"must be one of {', '.join(sorted(TRACKERS))}")


TRACKERS = ("tensorboard", "trackio", "wandb")


@dataclass
class RunConfig:
    """One whole run; the frozen run.yaml is this, resolved."""

    objective: ObjectiveConfig = MISSING
    kl: KLConfig = MISSING
    channels: ChannelsConfig = MISSING
    hardware: HardwareConfig = MISSING
    model: ModelConfig = MISSING
    task: TaskConfig = MISSING
    trainer: TrainerConfig = MISSING
    generation: GenerationConfig = MISSING
    tracking: TrackingConfig = MISSING
    seed: int = MISSING
    run_name: str = MISSING
    dry_run: bool = MISSING

    def __post_init__(self) -> None:
        require(0 <= self.seed < 2**32, "seed", self.seed, "must lie in [0, 2**32)")
        require(
            self.channels.alpha_sdpo == 0 or self.channels.sdpo_hints != SDPOHints.rules or len(self.task.hints) > 0,
            "channels.alpha_sdpo",
            self.channels.alpha_sdpo,
            f"needs hints, and task={self.task.name} has no rules; give task.hints, or channels.sdpo_hints=column|peer",
        )
        require(
            self.channels.beta_replay == 0 or self.task.replay_pairs is not None,
            "channels.beta_replay",
            self.channels.beta_replay,
            "needs preference pairs; give task.replay_pairs=FILE",
        )
        if self.kl.placement == KLPlacement.reward:
            require_kl_in_reward(self.objective, self.kl.reward_scaling.value, section="objective.", kl_section="kl.")
        plan_batch(self)


GROUPS = tuple(name for name, kind in get_type_hints(RunConfig).items() if is_dataclass(kind))

# GRPOConfig fields that a config key decides, so trainer.extra may not: same-named keys first.
EXTRA_OWNERS: dict[str, str] = {
    **{
        field.name: f"{section}.{field.name}"
        for section, config in (
            ("objective", ObjectiveConfig),
            ("kl", KLConfig),
            ("channels", ChannelsConfig),
            ("hardware", HardwareConfig),
            ("model", ModelConfig),
            ("trainer", TrainerConfig),
            ("generation", GenerationConfig),
            ("tracking", TrackingConfig),
        )
        for field in fields(config)
        if field.name not in ("name", "extra", "path")
    },
    "beta": "kl.coef",
    "bf16": "hardware.precision",
    "fp16": "hardware.precision",
    "use_cpu": "hardware.device",
    "dataloader_pin_memory": "hardware.device",
    "ddp_find_unused_parameters": "hardware.num_processes",
    "model_init_kwargs": "model.dtype and model.attn_implementation",
    "reward_weights": "task.rewards.<name>.weight",
    "max_tool_calling_iterations": "task.max_turns",
    "per_device_train_batch_size": "trainer.max_micro_batch_size",
    "per_device_eval_batch_size": "trainer.max_micro_batch_size",
    "gradient_accumulation_steps": "trainer.generation_batch_size and objective.updates_per_generation",
    "steps_per_generation": "trainer.generation_batch_size and objective.updates_per_generation",
    "num_generations_eval": "the held-out evaluation",
    "eval_strategy": "trainer.eval_steps",
    "do_eval": "trainer.eval_steps",
    "eval_on_start": "trainer.eval_steps",
    "logging_strategy": "trainer.logging_steps",
    "save_strategy": "the run",
    "save_steps": "the run",
    "num_completions_to_print": "tracking.log_completions",
    "output_dir": "hydra.run.dir",
    "run_name": "run_name",
    "seed": "seed",
    "data_seed": "seed",
    "disable_tqdm": "the progress bar",
    "use_vllm": "generation",
    "use_transformers_continuous_batching": "generation",
}


@dataclass(frozen=True)
class BatchPlan:
    """How rollouts become optimizer updates: all counts in rows or steps."""

    world_size: int
    # Rollouts per generation, all ranks.
    generation_batch_size: int
    num_generations: int
    # Rows per device per forward.
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    # Micro-batches per device per generation (TRL's meaning).
    steps_per_generation: int
    # Optimizer updates per generation: mini-batches times passes.
    updates: int
    warnings: tuple[str, ...]

    @property
    def prompts_per_generation(self) -> int:
        """Distinct prompts per generation."""
        return self.generation_batch_size // self.num_generations

    @property
    def rollouts_per_update(self) -> int:
        """Rollouts that one optimizer update averages over, all ranks."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * self.world_size


def plan_batch(run: RunConfig) -> BatchPlan:
    """Solve the batch arithmetic of a run.

    Rollouts per update = generation_batch_size / updates_per_generation; the micro-batch is the largest divisor
    of each rank's share within max_micro_batch_size; accumulation and TRL's steps_per_generation follow.
    Raises ConfigError with the nearest valid sizes when there is no integer solution.
    """
    total, group = run.trainer.generation_batch_size, run.trainer.num_generations
    updates, world = run.objective.updates_per_generation, run.hardware.num_processes
    unit = math.lcm(group, updates * world)
    if total % unit:
        nearest = sorted({max(total // unit, 1) * unit, (total // unit + 1) * unit})
        raise ConfigError(
            f"trainer.generation_batch_size={total}: must be a multiple of {unit} to split into groups of"
            f" num_generations={group} and updates_per_generation={updates} x {world} rank(s);"
            f" nearest: {' or '.join(map(str, nearest))}"
        )
    per_rank = total // updates // world
    micro = max(d for d in range(1, min(run.trainer.max_micro_batch_size, per_rank) + 1) if per_rank % d == 0)
    accumulation = per_rank // micro
    notes = []
    if total // updates < 4 * group:
        notes.append(
            f"{total // updates} rollouts per update is fewer than 4 groups of {group}; gradients will be noisy:"
            f" raise trainer.generation_batch_size or lower objective.updates_per_generation"
        )
    if updates * run.objective.num_iterations == 1 and run.objective.uses_ratio:
        notes.append(
            f"objective.updates_per_generation=1: the ratio stays 1, so {run.objective.name}'s clipping never acts"
        )
    if run.kl.placement == KLPlacement.reward:
        notes += kl_in_reward_warnings(run.objective, run.kl.estimator.value, section="objective.", kl_section="kl.")
    channels = run.channels
    if channels.alpha_sdpo > 0 and channels.sdpo_jsd_beta not in (0.0, 0.5, 1.0):
        notes.append(
            f"channels.sdpo_jsd_beta={channels.sdpo_jsd_beta:g}: near 0 and 1 the divergence shrinks up to 100 times,"
            " so this also moves the channel's weight; 0, 0.5 and 1 are comparable"
        )
    return BatchPlan(
        world_size=world,
        generation_batch_size=total,
        num_generations=group,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=updates * accumulation,
        updates=updates * run.objective.num_iterations,
        warnings=tuple(notes),
    )


def load_run(config: DictConfig | Mapping[str, Any]) -> RunConfig:
    """Rebuild a composed or frozen config on a pristine schema, so that nothing unknown or missing gets through.

    Raises ConfigError for an unknown knob (with the nearest name), a missing value, a wrong type, a value out of
    range and a broken cross-field rule.
    """
    node = config if isinstance(config, DictConfig) else OmegaConf.create(dict(config))
    try:
        values = OmegaConf.to_container(node, resolve=True, throw_on_missing=True, enum_to_str=True)
        _refuse_python_none(values)
        run = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(RunConfig), values))
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error)) from None
    assert isinstance(run, RunConfig)
    return run


def explain(error: OmegaConfBaseException) -> str:
    """Turn an OmegaConf error into one line that names the key and, for a typo, the nearest knob."""
    key = error.full_key or str(error.key or "")
    reason = str(error.msg or error).splitlines()[0]
    reason = reason[:1].lower() + reason[1:] if reason[:2].istitle() else reason
    if isinstance(error, (ConfigKeyError, ConfigAttributeError)):
        parent, _, name = key.rpartition(".")
        near = difflib.get_close_matches(name, _knobs(parent), n=1, cutoff=0.5)
        if near:
            return f"unknown knob {key}; did you mean {near[0]}?"
        menu = ", ".join(_knobs(parent))
        return f"unknown knob {key}; {parent or 'a run'} has {menu}" if menu else f"unknown knob {key}"
    if isinstance(error, MissingMandatoryValue):
        return f"missing value {key}: give it on the command line, {key}=..."
    return f"{key}: {reason}" if key else reason


def _knobs(section: str) -> list[str]:
    """Return the schema's field names under a dotted section ("" = the top level)."""
    schema: Any = RunConfig
    for part in filter(None, section.split(".")):
        if is_dataclass(schema):
            schema = get_type_hints(schema).get(part)
        elif get_origin(schema) is dict:
            schema = get_args(schema)[1]
        else:
            return []
    return [field.name for field in fields(schema)] if is_dataclass(schema) else []


def _refuse_python_none(values: Any) -> None:
    """Refuse the text None, which Hydra reads as a string where the user means null."""
    for key, value in _leaves(values, ""):
        require(value != "None", key, value, "is the text None; write null")


def _leaves(values: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if isinstance(values, Mapping):
        children: Iterable[tuple[Any, Any]] = values.items()
    elif isinstance(values, list):
        children = enumerate(values)
    else:
        yield prefix, values
        return
    for key, value in children:
        yield from _leaves(value, f"{prefix}.{key}" if prefix else str(key))
