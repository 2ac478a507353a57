"""KL in the reward: each rollout pays for its divergence from the reference before its group is compared.

R' = R - coef K, with K summed over the model's own tokens at the sampling policy. With a baseline and no division,
the policy gradient of R' is that of E[R] - coef KL(pi || ref) (arXiv:2512.21852).
"""

import warnings
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel
from trl import GRPOConfig
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import nanstd

from composer_rl.config import KLEstimator, RewardScaling, kl_in_reward_warnings, require, require_kl_in_reward
from composer_rl.losses import apply_kl_in_reward, kl_penalty_per_sequence


class KLInReward:
    """Replaces the advantages of a generation by those of the shaped reward R' = R - coef K.

    Args:
        coef: reward units per nat of a whole sequence, above 0; GRPOConfig.beta, which makes TRL build the reference.
        estimator: k1, whose reward gradient is the KL's, or k3, whose is not (a negative control).
        reward_scaling: none for A = R' - mean(R'), or raw_std for A = (R' - mean(R')) / (sd(R) + 1e-4) with the raw
            reward's standard deviation over what the trainer's scale_rewards names, group or batch.
    """

    def __init__(self, coef: float, estimator: str = "k1", reward_scaling: str = "none") -> None:
        self.coef = coef
        self.estimator = estimator
        self.reward_scaling = reward_scaling

    def reshape_advantages(
        self, trainer: Any, output: dict[str, Any], rewards_per_func: torch.Tensor
    ) -> dict[str, float]:
        """Write this rank's shaped advantages into `output`, and return what the KL did to the rewards.

        Every rank must call it, once per generation. It runs one policy forward when TRL kept no sampling log-probs.

        Args:
            trainer: a GRPOTrainer; only its logged advantages are written to.
            output: what _generate_and_score_completions returned in training, B rows.
            rewards_per_func: (ranks x B, functions), gathered, as _calculate_rewards returned them. A row that no
                function scored stays out of its group's mean and has advantage 0.

        The metrics are means over all ranks: k1 per sequence and per token in nats, whatever the estimator; the raw
        and the shaped reward; and coef sd(K) / sd(R) within groups, NaN where the reward has no spread.
        """
        mask = output["completion_mask"]
        if "tool_mask" in output:
            mask = mask * output["tool_mask"]
        logps, ref_logps = output.get("old_per_token_logps"), output["ref_per_token_logps"]
        if logps is None:
            logps = _sampling_logps(trainer, output)
        k1 = kl_penalty_per_sequence(logps, ref_logps, mask, "k1")
        kl = kl_penalty_per_sequence(logps, ref_logps, mask, self.estimator)
        # float64 from here on, so that rounding never makes a group of equal rewards look spread.
        local = torch.stack([k1, kl, mask.sum(dim=1).to(k1.dtype)], dim=1)
        k1, kl, tokens = trainer.accelerator.gather(local).double().unbind(dim=1)

        weights = trainer.reward_weights.to(rewards_per_func.device)
        rewards = (rewards_per_func * weights).double().nansum(dim=1)
        rewards[rewards_per_func.isnan().all(dim=1)] = torch.nan
        shaped = apply_kl_in_reward(rewards, kl, self.coef)
        scale = "none" if self.reward_scaling == "none" else trainer.scale_rewards
        advantages = shaped_advantages(rewards, shaped, trainer.num_generations, scale)

        rows = len(output["advantages"])
        first = trainer.accelerator.process_index * rows
        output["advantages"] = advantages[first : first + rows].to(output["advantages"].dtype)
        # As long as one generation, so this pushes out what TRL has just appended.
        trainer._logs["advantages"].extend(advantages.tolist())

        kl_spread = (
            _centred(kl.masked_fill(rewards.isnan(), torch.nan), trainer.num_generations).square().nanmean().sqrt()
        )
        reward_spread = _centred(rewards, trainer.num_generations).square().nanmean().sqrt()
        ratio = self.coef * kl_spread / reward_spread
        return {
            "kl_reward/k1_seq": k1.mean().item(),
            "kl_reward/k1_token": (k1.sum() / tokens.sum()).item(),
            "kl_reward/raw_reward": rewards.nanmean().item(),
            "kl_reward/shaped_reward": shaped.nanmean().item(),
            "kl_reward/coef_sd_ratio": ratio.item() if ratio.isfinite() else float("nan"),
        }


def shaped_advantages(rewards: torch.Tensor, shaped: torch.Tensor, num_generations: int, scale_by: str) -> torch.Tensor:
    """Advantages of shaped rewards in groups of consecutive rows: two (N,) -> (N,); NaN rewards give 0.

    scale_by none: R' - mean(R'). group or batch: divided by sd(R) + 1e-4, the Bessel-corrected deviation of the raw
    reward, so that coef means the same at any spread; where sd(R) is 0 the advantage is 0, because dividing by 1e-4
    would leave the KL alone to drive such groups, ten thousandfold.
    """
    advantages = _centred(shaped, num_generations)
    if scale_by != "none":
        if scale_by == "group":
            std = nanstd(rewards.view(-1, num_generations), dim=1).repeat_interleave(num_generations)
        else:
            std = nanstd(rewards).expand_as(rewards)
        flat = torch.isclose(std, torch.zeros_like(std))
        advantages = (advantages / (std + 1e-4)).masked_fill(flat, 0.0)
    return advantages.nan_to_num(nan=0.0)


def validate_kl_in_reward_config(
    args: GRPOConfig, model: str | PreTrainedModel, kl_estimator: str = "k1", kl_reward_scaling: str = "none"
) -> None:
    """Check that the KL in the reward is what it says under `args`; call it before GRPOTrainer loads the reference.

    `model` is GRPOTrainer's: a path, a hub name or a model object. Raises ValueError for an unknown estimator or
    scaling, a beta that is not above 0, reward scaling by a deviation that the KL changes, masked truncated rollouts,
    a vision-language model, and a model object whose reference cannot be loaded again. Warns of what runs but does
    not optimise reward minus KL.
    """
    for key, value, choices in (
        ("kl_estimator", kl_estimator, [member.value for member in KLEstimator]),
        ("kl_reward_scaling", kl_reward_scaling, [member.value for member in RewardScaling]),
    ):
        require(value in choices, key, value, f"must be {' or '.join(choices)}")
    require(args.beta > 0, "args.beta", args.beta, "is the coefficient of the KL in the reward; must be above 0")
    require_kl_in_reward(args, kl_reward_scaling, section="args.", kl_section="kl_")
    if isinstance(model, str):
        config = AutoConfig.from_pretrained(model, trust_remote_code=args.trust_remote_code)
    else:
        config = model.config
    require(
        "vision_config" not in config.sub_configs,
        "kl_in_reward",
        True,
        f"{type(config).__name__} is a vision-language model, whose log-probs would lack the images; use a text model",
    )
    # A PEFT model is its own reference, with the adapter off.
    if isinstance(model, PreTrainedModel):
        require(
            config._name_or_path != "",
            "kl_in_reward",
            True,
            "the model object has no path (config._name_or_path) to load the reference from; save_pretrained it and"
            " pass the folder",
        )
    for note in kl_in_reward_warnings(args, kl_estimator, section="args.", kl_section="kl_"):
        warnings.warn(note, stacklevel=2)


def _sampling_logps(trainer: Any, output: dict[str, Any]) -> torch.Tensor:
    """Log-probs (B, T) of the policy as it is now, which just sampled; computed as TRL computes the reference's."""
    with (
        torch.no_grad(),
        disable_gradient_checkpointing(trainer.model, trainer.args.gradient_checkpointing_kwargs),
    ):
        logps, _, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model,
            torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1),
            torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1),
            output["completion_ids"].size(1),
            batch_size=trainer.args.per_device_train_batch_size,
        )
    return logps


def _centred(values: torch.Tensor, num_generations: int) -> torch.Tensor:
    """Deviations from the group's mean over its rows that are not NaN: (N,) -> (N,)."""
    grouped = values.view(-1, num_generations)
    return (grouped - grouped.nanmean(dim=1, keepdim=True)).view(-1)
