"""The policy objective: presets of conf/objective as GRPOConfig keywords, for runs and for Python users."""

import difflib
import warnings
from dataclasses import fields
from enum import Enum
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from composer_rl.config import (
    ConfigError,
    KLConfig,
    ObjectiveConfig,
    RatioLevel,
    RunConfig,
    config_dir,
    explain,
    require,
)

if TYPE_CHECKING:
    from trl.trainer.grpo_config import GRPOConfig

PO_OBJECTIVES = tuple(sorted(path.stem for path in (config_dir() / "objective").glob("*.yaml")))

# What ObjectiveConfig says beyond GRPOConfig; every other field has TRL's name and meaning.
OWN_FIELDS = ("name", "reproduces", "updates_per_generation", "published_kl")


def objective_arguments(objective: ObjectiveConfig, kl: KLConfig) -> dict[str, Any]:
    """Return the GRPOConfig keywords that make up the algorithm: the policy loss and its KL.

    beta is kl.coef, also when the KL is in the reward: TRL then keeps a reference and its log-probs, and
    ComposerTrainer(kl_in_reward=True) takes beta out of the loss. The batch schedule is not among them: it follows
    from updates_per_generation and the batch sizes.
    """
    arguments = {
        name: value.value if isinstance(value, Enum) else value
        for name, value in vars(objective).items()
        if name not in OWN_FIELDS
    }
    arguments["beta"] = kl.coef
    arguments["use_bias_correction_kl"] = kl.use_bias_correction_kl
    return arguments


def make_po_config(name: str | None = None, **overrides: Any) -> "GRPOConfig":
    """Build the GRPOConfig of an objective preset, with the KL that its paper used.

    `name` is one of PO_OBJECTIVES in any case; None means dr_grpo. `overrides` are GRPOConfig fields. Unless
    generation_batch_size or steps_per_generation is among them, a generation of rollouts is split into the
    preset's updates_per_generation optimizer updates.

    Raises ConfigError for an unknown name or field, for values that break the objective's rules, and for a
    schedule that keeps a sequence-level ratio at 1, which would turn GSPO into GRPO; warns of such a schedule
    under any other ratio objective. Raises RuntimeError when GRPOConfig holds another value than requested.
    """
    from trl.trainer.grpo_config import GRPOConfig

    known = [field.name for field in fields(GRPOConfig)]
    for field in overrides:
        near = difflib.get_close_matches(field, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        require(field in known, field, overrides[field], f"is not a GRPOConfig field{hint}")

    objective, kl = _load_preset(("dr_grpo" if name is None else name).lower(), overrides)
    requested = objective_arguments(objective, kl)
    if not {"generation_batch_size", "steps_per_generation"} & overrides.keys():
        accumulation = overrides.get("gradient_accumulation_steps", GRPOConfig.gradient_accumulation_steps)
        requested["steps_per_generation"] = accumulation * objective.updates_per_generation

    config = GRPOConfig(**{**overrides, **requested})
    for field, value in requested.items():
        taken = vars(config)[field]
        if taken != value:
            raise RuntimeError(f"GRPOConfig.{field}={taken}: {value} was requested; check TRL's version")

    assert config.steps_per_generation is not None
    generate_every = config.steps_per_generation * config.num_iterations
    # TRL's own condition for not computing old log-probs (_generate_and_score_completions).
    if objective.uses_ratio and config.gradient_accumulation_steps % generate_every == 0:
        reason = (
            f"steps_per_generation={config.steps_per_generation}: one optimizer update per generation keeps"
            f" the ratio at 1, so {objective.name}'s clipping never acts; give at least"
            f" {2 * config.gradient_accumulation_steps}"
        )
        if objective.importance_sampling_level == RatioLevel.sequence:
            raise ConfigError(reason)
        warnings.warn(reason, stacklevel=2)
    return config


def make_dr_grpo_config(**overrides: Any) -> "GRPOConfig":
    """Build the GRPOConfig of Dr. GRPO; see make_po_config."""
    return make_po_config("dr_grpo", **overrides)


def _load_preset(name: str, overrides: dict[str, Any]) -> tuple[ObjectiveConfig, KLConfig]:
    """Read a preset and kl=published, with those overrides applied that belong to the algorithm.

    Raises ConfigError for an unknown name and for values outside the schema's rules.
    """
    require(name in PO_OBJECTIVES, "objective", name, f"must be one of {', '.join(PO_OBJECTIVES)}")
    presets = config_dir()
    algorithm = {field.name for field in fields(ObjectiveConfig)}.difference(OWN_FIELDS)
    chosen_kl: dict[str, Any] = {}
    if "beta" in overrides:
        chosen_kl = {
            "placement": "loss" if overrides["beta"] else "none",
            "coef": overrides["beta"],
            "estimator": "k3" if overrides["beta"] else "k1",
        }
    if "use_bias_correction_kl" in overrides:
        chosen_kl["use_bias_correction_kl"] = overrides["use_bias_correction_kl"]
    try:
        run = OmegaConf.merge(
            OmegaConf.structured(RunConfig),
            {
                "objective": OmegaConf.load(presets / "objective" / f"{name}.yaml"),
                "kl": OmegaConf.load(presets / "kl" / "published.yaml"),
            },
            {
                "objective": {field: value for field, value in overrides.items() if field in algorithm},
                "kl": chosen_kl,
            },
        )
        objective, kl = OmegaConf.to_object(run.objective), OmegaConf.to_object(run.kl)
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error)) from None
    assert isinstance(objective, ObjectiveConfig) and isinstance(kl, KLConfig)
    return objective, kl
