"""The losses that GRPOTrainer lacks, as pure functions of tensors, with the equation or section on the line."""

import math

import torch
import torch.nn.functional as F


def generalized_jsd(student_logprobs: torch.Tensor, teacher_logprobs: torch.Tensor, beta: float) -> torch.Tensor:
    """Divergence of two distributions per token, in nats: (..., V) normalised log-probs -> (...).

    beta 0 is KL(teacher || student), 1 is KL(student || teacher); between them it is
    beta KL(T || M) + (1 - beta) KL(S || M) with M = beta T + (1 - beta) S (GKD, arXiv:2306.13649, eq. 1). The scale
    is not continuous in beta: near 0 and 1 the mixture form tends to 0, not to the two KLs. No gradient reaches
    the teacher. Log-probs must be finite.

    Raises ValueError for beta outside [0, 1].
    """
    if not 0 <= beta <= 1:
        raise ValueError(f"beta={beta}: must be in [0, 1]")
    teacher_logprobs = teacher_logprobs.detach()
    if beta == 0:
        return _kl(teacher_logprobs, student_logprobs)
    if beta == 1:
        return _kl(student_logprobs, teacher_logprobs)
    mixture = torch.logaddexp(teacher_logprobs + math.log(beta), student_logprobs + math.log1p(-beta))
    return beta * _kl(teacher_logprobs, mixture) + (1 - beta) * _kl(student_logprobs, mixture)


def _kl(p_logprobs: torch.Tensor, q_logprobs: torch.Tensor) -> torch.Tensor:
    """KL(p || q) over the last dimension."""
    return (p_logprobs.exp() * (p_logprobs - q_logprobs)).sum(-1)


def generalized_jsd_loss(
    student_logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    mask: torch.Tensor,
    *,
    beta: float,
    temperature: float = 1.0,
    token_clip: float | None = None,
) -> torch.Tensor:
    """Mean of `generalized_jsd` over the tokens whose mask is 1; a zero with a gradient when there is none.

    Args:
        student_logits, teacher_logits: (..., V), raw; both are divided by `temperature`.
        mask: (...), 0 or 1.
        beta: see generalized_jsd.
        temperature: above 0.
        token_clip: upper bound of one token's divergence, in nats; a clipped token has no gradient. None = none.

    Raises ValueError for beta outside [0, 1] and for a temperature that is not above 0.
    """
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}: must be above 0")
    divergence = generalized_jsd(
        F.log_softmax(student_logits / temperature, -1), F.log_softmax(teacher_logits / temperature, -1), beta
    )
    if token_clip is not None:
        divergence = divergence.clamp(max=token_clip)
    return (divergence * mask).sum() / mask.sum().clamp(min=1)


def importance_weight(logps: torch.Tensor, old_logps: torch.Tensor, clip: float) -> torch.Tensor:
    """Weight of an off-policy token: min(exp(log pi - log pi_old), clip), no gradient (SDPO, arXiv:2601.20802)."""
    return (logps - old_logps).detach().exp().clamp(max=clip)


def kl_penalty_per_sequence(
    logps: torch.Tensor, ref_logps: torch.Tensor, mask: torch.Tensor, estimator: str = "k1"
) -> torch.Tensor:
    """Estimate of KL(policy || reference) of each sequence, in nats: three (B, T) -> (B,), summed over tokens.

    With d = log ref - log pi, k1 is -d and k3 is exp(d) - 1 - d (Schulman, "Approximating KL divergence"). The
    sum of k1, not its mean over tokens, is what makes the reward penalty's gradient that of the KL.

    Raises ValueError for another estimator.
    """
    d = ref_logps - logps
    if estimator == "k1":
        per_token = -d
    elif estimator == "k3":
        per_token = torch.expm1(d) - d
    else:
        raise ValueError(f"estimator={estimator}: must be k1 or k3")
    return (per_token * mask).sum(-1)


def apply_kl_in_reward(rewards: torch.Tensor, kl: torch.Tensor, coef: float) -> torch.Tensor:
    """Shaped reward R' = R - coef K, before any baseline is taken: two tensors of one shape -> the same shape."""
    return rewards - coef * kl


def preference_loss(
    chosen_logratio: torch.Tensor,
    rejected_logratio: torch.Tensor,
    *,
    beta: float,
    loss_type: str,
    chosen_length: torch.Tensor | None = None,
    rejected_length: torch.Tensor | None = None,
    flip_rate: float = 0.0,
) -> torch.Tensor:
    """Preference loss of each pair: (P,) log-ratios -> (P,).

    Args:
        chosen_logratio, rejected_logratio: (P,), log pi - log ref summed over the response's tokens.
        beta: strength of the pull to the reference, above 0. Under ipo it acts on means over tokens.
        loss_type: sigmoid (DPO, arXiv:2305.18290), ipo (arXiv:2310.12036) or robust (arXiv:2403.00409).
        chosen_length, rejected_length: (P,), tokens of each response; ipo needs them.
        flip_rate: robust's probability that a pair's label is wrong, in [0, 0.5).

    Raises ValueError for another loss_type, a flip_rate out of range or without robust, and ipo without lengths.
    """
    if not (flip_rate == 0 or (loss_type == "robust" and 0 < flip_rate < 0.5)):
        raise ValueError(f"flip_rate={flip_rate}: must be in [0, 0.5) for loss_type=robust and 0 for {loss_type}")
    if loss_type == "ipo":
        if chosen_length is None or rejected_length is None:
            raise ValueError("loss_type=ipo: needs chosen_length and rejected_length")
        # Eq. 17, on length-averaged log-ratios as its authors ran it.
        difference = chosen_logratio / chosen_length - rejected_logratio / rejected_length
        return (difference - 1 / (2 * beta)) ** 2
    margin = beta * (chosen_logratio - rejected_logratio)
    if loss_type == "sigmoid":
        return -F.logsigmoid(margin)  # eq. 7
    if loss_type == "robust":
        # The rDPO estimator: its mean over label flips is the loss under clean labels.
        return (flip_rate * F.logsigmoid(-margin) - (1 - flip_rate) * F.logsigmoid(margin)) / (1 - 2 * flip_rate)
    raise ValueError(f"loss_type={loss_type}: must be sigmoid, ipo or robust")


def sft_loss(logps: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
    """Negative log-likelihood per token of each response: (P,) summed log-probs and (P,) tokens -> (P,)."""
    return -logps / length
