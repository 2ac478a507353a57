"""The pure losses against hand-worked numbers and formulas written here from the papers, all in float64."""

import math

import pytest
import torch

from composer_rl.losses import (
    apply_kl_in_reward,
    generalized_jsd,
    generalized_jsd_loss,
    importance_weight,
    kl_penalty_per_sequence,
    preference_loss,
    sft_loss,
)

# Three-word vocabularies.
STUDENT = [0.5, 0.25, 0.25]
TEACHER = [0.25, 0.25, 0.5]


def log(probabilities):
    return torch.tensor(probabilities, dtype=torch.float64).log()


def random_logits(*shape, seed=0, scale=2.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def plain_divergence(student, teacher, beta):
    """The definition, in Python floats, one probability at a time."""

    def kl(p, q):
        return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))

    if beta in (0, 1):
        return kl(teacher, student) if beta == 0 else kl(student, teacher)
    mixture = [beta * t + (1 - beta) * s for s, t in zip(student, teacher, strict=True)]
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)


def test_the_ends_of_beta_are_the_two_kls_worked_by_hand():
    # 1/4 ln 1/2 + 1/2 ln 2 in either direction, so a second teacher tells the directions apart.
    assert generalized_jsd(log(STUDENT), log(TEACHER), 0.0).item() == pytest.approx(0.25 * math.log(2), abs=1e-15)
    student, teacher = log(STUDENT), log([0.125, 0.375, 0.5])
    forward = 0.125 * math.log(1 / 4) + 0.375 * math.log(3 / 2) + 0.5 * math.log(2)
    reverse = 0.5 * math.log(4) + 0.25 * math.log(2 / 3) + 0.25 * math.log(1 / 2)
    assert forward != pytest.approx(reverse, abs=1e-2)
    assert generalized_jsd(student, teacher, 0.0).item() == pytest.approx(forward, abs=1e-15)
    assert generalized_jsd(student, teacher, 1.0).item() == pytest.approx(reverse, abs=1e-15)


def test_the_middle_of_beta_is_the_jensen_shannon_divergence_worked_by_hand():
    # M = (3/8, 1/4, 3/8); both KLs to it are 1/2 ln 4/3 + 1/4 ln 2/3.
    by_hand = 0.5 * math.log(4 / 3) + 0.25 * math.log(2 / 3)
    assert generalized_jsd(log(STUDENT), log(TEACHER), 0.5).item() == pytest.approx(by_hand, abs=1e-15)


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.3, 0.5, 0.9, 1.0])
def test_every_beta_agrees_with_the_definition_in_value_and_gradient(beta):
    logits, teacher = random_logits(5, 3, seed=1).requires_grad_(), random_logits(5, 3, seed=2).log_softmax(-1)
    divergence = generalized_jsd(logits.log_softmax(-1), teacher, beta)
    plain = [
        plain_divergence(s, t, beta) for s, t in zip(logits.softmax(-1).tolist(), teacher.exp().tolist(), strict=True)
    ]
    assert divergence.tolist() == pytest.approx(plain, abs=1e-14)

    gradient = torch.autograd.grad(divergence.sum(), logits)[0]
    step = 1e-6
    for token in range(5):
        for word in range(3):
            moved = []
            for sign in (1, -1):
                shifted = logits.detach()[token].clone()
                shifted[word] += sign * step
                moved.append(plain_divergence(shifted.softmax(-1).tolist(), teacher[token].exp().tolist(), beta))
            assert gradient[token, word].item() == pytest.approx((moved[0] - moved[1]) / (2 * step), abs=1e-8)


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_the_divergence_is_that_of_trls_gkd(beta, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.gkd import GKDTrainer

    student, teacher = random_logits(2, 4, 7, seed=3), random_logits(2, 4, 7, seed=4)
    ours = generalized_jsd_loss(student, teacher, torch.ones(2, 4), beta=beta, temperature=0.7)
    labels = torch.ones(2, 4, dtype=torch.long)
    theirs = GKDTrainer.generalized_jsd_loss(student, teacher, labels, beta=beta, temperature=0.7)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-12)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_no_gradient_reaches_the_teacher_even_when_it_is_the_student(beta):
    student, teacher = random_logits(4, 3, seed=5).requires_grad_(), random_logits(4, 3, seed=6).requires_grad_()
    generalized_jsd_loss(student, teacher, torch.ones(4), beta=beta).backward()
    assert teacher.grad is None and student.grad.abs().max() > 1e-3

    # Shared logits: the gradient is the student side's alone, which is 0 where the two agree.
    shared = random_logits(4, 3, seed=5).requires_grad_()
    detached = random_logits(4, 3, seed=5)
    generalized_jsd_loss(shared, 2 * shared, torch.ones(4), beta=beta).backward()
    alone = random_logits(4, 3, seed=5).requires_grad_()
    generalized_jsd_loss(alone, 2 * detached, torch.ones(4), beta=beta).backward()
    assert torch.equal(shared.grad, alone.grad)


def test_equal_distributions_have_no_divergence_and_no_gradient():
    for beta in (0.0, 0.3, 0.5, 1.0):
        logits = random_logits(4, 50, seed=7).requires_grad_()
        loss = generalized_jsd_loss(logits, logits.detach().clone(), torch.ones(4), beta=beta)
        loss.backward()
        assert abs(loss.item()) < 1e-14 and logits.grad.abs().max() < 1e-14


def test_the_scale_breaks_at_the_ends_of_beta():
    student, teacher = log([0.98, 0.01, 0.01]), log([0.01, 0.01, 0.98])
    at_end = generalized_jsd(student, teacher, 0.0).item()
    beside = generalized_jsd(student, teacher, 0.01).item()
    assert at_end > 50 * beside
    # Near an end the mixture form is beta times the KL to first order.
    small = 1e-7
    assert generalized_jsd(student, teacher, small).item() == pytest.approx(small * at_end, rel=1e-3)


def test_the_loss_is_the_mean_over_masked_tokens_at_the_temperature():
    student, teacher = random_logits(2, 3, 4, seed=8), random_logits(2, 3, 4, seed=9)
    mask = torch.tensor([[1.0, 0, 1], [0, 0, 1]], dtype=torch.float64)
    kept = [(0, 0), (0, 2), (1, 2)]
    by_token = [
        plain_divergence((student[at] / 0.5).softmax(-1).tolist(), (teacher[at] / 0.5).softmax(-1).tolist(), 0.5)
        for at in kept
    ]
    loss = generalized_jsd_loss(student, teacher, mask, beta=0.5, temperature=0.5)
    assert loss.item() == pytest.approx(sum(by_token) / 3, rel=1e-13)

    clipped = generalized_jsd_loss(student, teacher, mask, beta=0.5, temperature=0.5, token_clip=min(by_token))
    assert clipped.item() == pytest.approx(min(by_token), rel=1e-13)
    assert max(by_token) > min(by_token)


def test_a_clipped_token_pushes_no_more():
    student, teacher = random_logits(2, 3, seed=10).requires_grad_(), random_logits(2, 3, seed=11)
    by_token = generalized_jsd(student.log_softmax(-1), teacher.log_softmax(-1), 0.0).detach()
    between = by_token.mean().item()
    generalized_jsd_loss(student, teacher, torch.ones(2), beta=0.0, token_clip=between).backward()
    largest = by_token.argmax()
    assert student.grad[largest].abs().max() == 0 and student.grad[1 - largest].abs().max() > 1e-3


def test_an_empty_mask_gives_a_zero_that_can_go_backward():
    student = random_logits(2, 3, seed=12).requires_grad_()
    loss = generalized_jsd_loss(student, random_logits(2, 3, seed=13), torch.zeros(2), beta=0.5)
    loss.backward()
    assert loss.item() == 0 and torch.equal(student.grad, torch.zeros(2, 3, dtype=torch.float64))


def test_a_beta_or_temperature_out_of_range_is_refused():
    logits = random_logits(1, 3)
    for beta in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match=r"beta=.*: must be in \[0, 1\]"):
            generalized_jsd(logits, logits, beta)
    for temperature in (0.0, -1.0):
        with pytest.raises(ValueError, match=r"temperature=.*: must be above 0"):
            generalized_jsd_loss(logits, logits, torch.ones(1), beta=0.0, temperature=temperature)


def test_the_importance_weight_is_the_clipped_ratio_and_carries_no_gradient():
    logps = torch.tensor([-1.0, -1.0, -3.0], dtype=torch.float64, requires_grad=True)
    weight = importance_weight(logps, torch.tensor([-1.5, -4.0, -1.0], dtype=torch.float64), clip=2.0)
    assert weight.tolist() == pytest.approx([math.exp(0.5), 2.0, math.exp(-2.0)], rel=1e-14)
    assert not weight.requires_grad


def test_the_kl_of_a_sequence_is_summed_over_its_own_tokens():
    logps = torch.tensor([[-1.0, -2.0, -9.0], [-0.5, -0.5, -0.5]], dtype=torch.float64)
    ref = torch.tensor([[-1.5, -1.0, 0.0], [-0.5, -1.5, -2.5]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    assert kl_penalty_per_sequence(logps, ref, mask).tolist() == pytest.approx([0.5 - 1.0, 0.0 + 1.0 + 2.0])
    k3 = kl_penalty_per_sequence(logps, ref, mask, "k3").tolist()
    assert k3 == pytest.approx(
        [(math.exp(-0.5) - 0.5) + (math.exp(1.0) - 2.0), 0.0 + math.exp(-1.0) + (math.exp(-2.0) + 1.0)]
    )
    with pytest.raises(ValueError, match="estimator=k2: must be k1 or k3"):
        kl_penalty_per_sequence(logps, ref, mask, "k2")


def test_both_estimators_average_to_the_kl_over_all_sequences():
    # Two tokens of three words, enumerated: the mean under the policy is exact.
    policy, ref = log([0.5, 0.3, 0.2]), log([0.2, 0.3, 0.5])
    words = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    logps, ref_logps, mask = policy[words], ref[words], torch.ones(9, 2)
    probability = logps.sum(-1).exp()
    exact = 2 * (policy.exp() * (policy - ref)).sum()
    for estimator in ("k1", "k3"):
        mean = (probability * kl_penalty_per_sequence(logps, ref_logps, mask, estimator)).sum()
        assert mean.item() == pytest.approx(exact.item(), rel=1e-12)


def test_the_kl_is_taken_off_the_reward_before_any_baseline():
    rewards, kl = torch.tensor([1.0, 0.0, 1.0]), torch.tensor([10.0, -2.0, 0.0])
    assert apply_kl_in_reward(rewards, kl, 0.04).tolist() == pytest.approx([0.6, 0.08, 1.0])


CHOSEN, REJECTED = [3.0, -1.0, 0.0, 40.0], [1.0, 2.0, 0.0, -40.0]
LENGTHS = ([4.0, 2.0, 1.0, 10.0], [2.0, 1.0, 3.0, 8.0])


def preference(loss_type, beta=0.5, **arguments):
    tensors = [torch.tensor(values, dtype=torch.float64, requires_grad=True) for values in (CHOSEN, REJECTED)]
    loss = preference_loss(*tensors, beta=beta, loss_type=loss_type, **arguments)
    return loss, *torch.autograd.grad(loss.sum(), tensors)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def test_sigmoid_is_dpo_as_published():
    loss, chosen_gradient, rejected_gradient = preference("sigmoid")
    margins = [0.5 * (c - r) for c, r in zip(CHOSEN, REJECTED, strict=True)]
    assert margins[:3] == [1.0, -1.5, 0.0]
    assert loss.tolist()[:3] == pytest.approx([-math.log(sigmoid(m)) for m in margins[:3]], rel=1e-13)
    assert loss[2].item() == pytest.approx(math.log(2))
    # Section 4: the gradient's weight is beta sigmoid(-margin).
    by_hand = [0.5 * sigmoid(-m) for m in margins]
    assert chosen_gradient.tolist() == pytest.approx([-w for w in by_hand], rel=1e-12)
    assert rejected_gradient.tolist() == pytest.approx(by_hand, rel=1e-12)


def test_ipo_regresses_length_averaged_log_ratios_on_half_of_one_over_beta():
    lengths = [torch.tensor(values, dtype=torch.float64) for values in LENGTHS]
    loss, chosen_gradient, _ = preference("ipo", chosen_length=lengths[0], rejected_length=lengths[1])
    differences = [c / n - r / m for c, r, n, m in zip(CHOSEN, REJECTED, *LENGTHS, strict=True)]
    assert loss.tolist() == pytest.approx([(d - 1.0) ** 2 for d in differences], rel=1e-13)
    by_hand = [2 * (d - 1.0) / n for d, n in zip(differences, LENGTHS[0], strict=True)]
    assert chosen_gradient.tolist() == pytest.approx(by_hand, rel=1e-13)
    with pytest.raises(ValueError, match="loss_type=ipo: needs chosen_length"):
        preference("ipo")


def test_robust_undoes_flipped_labels_on_average():
    rate = 0.2
    robust, _, _ = preference("robust", flip_rate=rate)
    clean, _, _ = preference("sigmoid")
    swapped = -torch.nn.functional.logsigmoid(0.5 * (torch.tensor(REJECTED) - torch.tensor(CHOSEN)).double())
    formula = ((1 - rate) * clean - rate * swapped) / (1 - 2 * rate)
    assert robust.tolist() == pytest.approx(formula.tolist(), rel=1e-13)

    # Labels flipped at that rate give the clean loss in the mean.
    flipped = preference_loss(
        torch.tensor(REJECTED).double(), torch.tensor(CHOSEN).double(), beta=0.5, loss_type="robust", flip_rate=rate
    )
    assert ((1 - rate) * robust + rate * flipped).tolist() == pytest.approx(clean.tolist(), rel=1e-12, abs=1e-12)
    assert preference("robust")[0].tolist() == pytest.approx(clean.tolist(), rel=1e-14)


def test_a_flip_rate_that_has_no_effect_or_no_meaning_is_refused():
    for loss_type, rate in (("sigmoid", 0.1), ("robust", 0.5), ("robust", -0.1)):
        with pytest.raises(ValueError, match=rf"flip_rate={rate}: must be in \[0, 0.5\) for loss_type=robust"):
            preference(loss_type, flip_rate=rate)
    with pytest.raises(ValueError, match="loss_type=hinge: must be sigmoid, ipo or robust"):
        preference("hinge")


def test_the_sft_loss_is_the_negative_mean_log_probability_of_a_token():
    assert sft_loss(torch.tensor([-6.0, -1.0]), torch.tensor([3, 4])).tolist() == [2.0, 0.25]
