"""Loss and gradient of every objective preset, as GRPOTrainer computes them, against its published formula.

The formulas are written from the papers, row by row over model tokens only, in float64; their constants are
the papers', not the presets'. T = completion positions of a row, padding and tool results included.
"""

from collections import Counter, defaultdict
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from datasets import Dataset
from omegaconf import OmegaConf
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from composer_rl.config import KLConfig, KLPlacement, ObjectiveConfig, config_dir
from composer_rl.objective import PO_OBJECTIVES, make_po_config, objective_arguments

ROWS, T = 6, 7
MAX_COMPLETION_LENGTH = 11
TOLERANCE = 1e-12


class Row(NamedTuple):
    """One rollout at its model tokens."""

    logp: torch.Tensor
    old: torch.Tensor
    ref: torch.Tensor
    advantage: float

    @property
    def ratio(self):
        return torch.exp(self.logp - self.old)

    @property
    def sequence_ratio(self):
        return torch.exp((self.logp - self.old).sum() / len(self.logp))


class MicroBatch(NamedTuple):
    """ROWS rollouts of one rank: the leaf (ROWS, T) of the gradient, and TRL's batch around it."""

    logps: torch.Tensor
    inputs: dict
    rows: list[Row]


def micro_batch(seed, drift):
    """Draw uneven rollouts: both advantage signs, tool results inside two rows, and a row of one token.

    The number of tokens differs between seeds, so that a mean over one micro-batch shows. drift scales the
    log-ratio per token; 0 leaves the old log-probs out, as TRL does on-policy.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    logps = (-normal(ROWS, T).abs() - 0.1).requires_grad_()
    old = logps.detach() - drift * normal(ROWS, T)
    ref = logps.detach() + 0.5 * normal(ROWS, T)
    advantages = torch.roll(torch.tensor([1.3, -0.7, 0.4, -1.1, 0.9, -0.2], dtype=torch.float64), seed)
    lengths = [(7, 2 + seed % 5, 1, 6, 3, 4)[(row + 2 * seed) % ROWS] for row in range(ROWS)]
    completion_mask = torch.tensor([[int(t < length) for t in range(T)] for length in lengths])
    tool_mask = torch.ones(ROWS, T, dtype=torch.int64)
    tool_mask[lengths.index(7), 2:5] = 0
    tool_mask[lengths.index(6), 1] = 0

    rows = []
    for row in range(ROWS):
        at = [t for t in range(T) if completion_mask[row, t] and tool_mask[row, t]]
        rows.append(Row(logps[row, at], old[row, at], ref[row, at], advantages[row].item()))
    inputs = {
        "prompt_ids": torch.zeros(ROWS, 2, dtype=torch.int64),
        "prompt_mask": torch.ones(ROWS, 2, dtype=torch.int64),
        "completion_ids": torch.zeros(ROWS, T, dtype=torch.int64),
        "completion_mask": completion_mask,
        "tool_mask": tool_mask,
        "advantages": advantages,
        "ref_per_token_logps": ref,
    }
    if drift:
        inputs["old_per_token_logps"] = old
    return MicroBatch(logps, inputs, rows)


class Layout(NamedTuple):
    """How a generation is split: `steps` micro-batches per rank, `accumulation` of them per update."""

    ranks: int
    accumulation: int
    steps: int


class Update(NamedTuple):
    """What one optimizer update sees: its micro-batches on all ranks, and the generation's tokens per update."""

    micro_batches: list[MicroBatch]
    tokens: float

    @property
    def rows(self):
        return [row for batch in self.micro_batches for row in batch.rows]


def first_update(layout, drift):
    generation = [micro_batch(seed, drift) for seed in range(layout.ranks * layout.steps)]
    tokens = sum(len(row.logp) for batch in generation for row in batch.rows)
    for batch in generation:
        batch.inputs["num_items_in_batch"] = torch.tensor(tokens)
    return Update(generation[: layout.ranks * layout.accumulation], tokens * layout.accumulation / layout.steps)


def surrogate(row, ratio, low, high):
    """min(r A, clip(r, 1 - low, 1 + high) A), per entry of `ratio`."""
    return torch.min(ratio * row.advantage, ratio.clamp(1 - low, 1 + high) * row.advantage)


def k3(row):
    """exp(d) - d - 1 per token, d = log pi_ref - log pi."""
    d = row.ref - row.logp
    return torch.exp(d) - d - 1


def mean(values):
    return sum(values) / len(values)


def dr_grpo(update):
    total = sum(surrogate(row, row.ratio, 0.2, 0.2).sum() for row in update.rows)
    return -total / (len(update.rows) * MAX_COMPLETION_LENGTH)


def grpo(update):
    return -mean([(surrogate(row, row.ratio, 0.2, 0.2) - 0.04 * k3(row)).mean() for row in update.rows])


def bnpo(update):
    token_means = []
    for batch in update.micro_batches:
        token_means.append(torch.cat([surrogate(row, row.ratio, 0.2, 0.2) for row in batch.rows]).mean())
    return -mean(token_means)


def dapo(update):
    return -sum(surrogate(row, row.ratio, 0.2, 0.28).sum() for row in update.rows) / update.tokens


def gspo(update):
    return -mean([surrogate(row, row.sequence_ratio, 3e-4, 4e-4) for row in update.rows])


def cispo(update):
    weighted = [row.ratio.detach().clamp(max=5.0) * row.advantage * row.logp for row in update.rows]
    return -sum(tokens.sum() for tokens in weighted) / update.tokens


def sapo(update):
    gated = []
    for row in update.rows:
        tau = 1.0 if row.advantage > 0 else 1.05
        gated.append((4 / tau * torch.sigmoid(tau * (row.ratio - 1)) * row.advantage).mean())
    return -mean(gated)


FORMULAS = {f.__name__: f for f in (dr_grpo, grpo, bnpo, dapo, gspo, cispo, sapo)}

# The log-ratio per token that puts ratios inside and outside of each clip.
DRIFT = {"gspo": 1e-3} | dict.fromkeys(("dr_grpo", "grpo", "bnpo", "dapo", "cispo", "sapo"), 1.2)


def preset(name):
    values = OmegaConf.load(config_dir() / "objective" / f"{name}.yaml")
    objective = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ObjectiveConfig), values))
    return objective, objective.published_kl


def trl_loss(arguments, update, layout, output_dir):
    """Return one update's loss as GRPOTrainer accumulates it, and as DDP averages it over ranks."""
    args = GRPOConfig(
        **arguments,
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=layout.accumulation,
        steps_per_generation=layout.steps,
        num_generations=2,
        max_completion_length=MAX_COMPLETION_LENGTH,
        use_cpu=True,
        bf16=False,
        report_to="none",
        output_dir=str(output_dir),
    )
    losses = []
    for batch in update.micro_batches:
        trainer = SimpleNamespace(
            args=args,
            beta=args.beta,
            loss_type=args.loss_type,
            epsilon_low=args.epsilon,
            epsilon_high=args.epsilon if args.epsilon_high is None else args.epsilon_high,
            importance_sampling_level=args.importance_sampling_level,
            off_policy_mask_threshold=args.off_policy_mask_threshold,
            top_entropy_quantile=args.top_entropy_quantile,
            max_completion_length=args.max_completion_length,
            use_vllm=args.use_vllm,
            aux_loss_enabled=False,
            current_gradient_accumulation_steps=layout.accumulation,
            model=SimpleNamespace(training=True),
            accelerator=SimpleNamespace(num_processes=layout.ranks, gather=lambda x: x, reduce=lambda x, reduction: x),
            _entropy_bonus_enabled=args.entropy_coef != 0.0 or args.use_adaptive_entropy,
            _metrics={"train": defaultdict(list)},
            _get_per_token_logps_and_entropies=lambda *_, logps=batch.logps, **__: (
                logps,
                torch.zeros_like(logps),
                None,
            ),
        )
        losses.append(GRPOTrainer._compute_loss(trainer, None, batch.inputs))
    return sum(losses) / layout.ranks


def assert_equal_loss_and_gradient(loss, expected, update):
    leaves = [batch.logps for batch in update.micro_batches]
    gradients = torch.autograd.grad(loss, leaves)
    expected_gradients = torch.autograd.grad(expected, leaves)
    assert abs(loss.item() - expected.item()) <= TOLERANCE
    assert max((a - b).abs().max().item() for a, b in zip(gradients, expected_gradients, strict=True)) <= TOLERANCE
    assert max(gradient.abs().max().item() for gradient in gradients) > 1e-3


@pytest.fixture
def float64():
    """Make float64 the default: TRL's SAPO temperatures are tensors of the default dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


LAYOUTS = [Layout(1, 1, 1), Layout(1, 3, 3), Layout(1, 2, 4), Layout(2, 2, 8)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", PO_OBJECTIVES)
def test_loss_and_gradient_equal_the_published_formula(float64, tmp_path, name, layout):
    update = first_update(layout, DRIFT[name])
    loss = trl_loss(objective_arguments(*preset(name)), update, layout, tmp_path)
    assert_equal_loss_and_gradient(loss, FORMULAS[name](update), update)


@pytest.mark.parametrize("name", PO_OBJECTIVES)
def test_loss_and_gradient_equal_the_published_formula_on_policy(float64, tmp_path, name):
    layout = Layout(1, 3, 3)
    update = first_update(layout, drift=0)
    loss = trl_loss(objective_arguments(*preset(name)), update, layout, tmp_path)
    assert_equal_loss_and_gradient(loss, FORMULAS[name](update), update)


@pytest.mark.parametrize(("name", "low", "high"), [("dapo", 0.8, 1.28), ("gspo", 1 - 3e-4, 1 + 4e-4), ("cispo", 0, 5)])
def test_the_drawn_rollouts_lie_on_every_side_of_the_clip_under_both_advantage_signs(name, low, high):
    found = Counter()
    for row in first_update(LAYOUTS[-1], DRIFT[name]).rows:
        ratios = [row.sequence_ratio.item()] if name == "gspo" else row.ratio.tolist()
        found.update((row.advantage > 0, "below" if r < low else "above" if r > high else "inside") for r in ratios)
    sides = ("inside", "above") if name == "cispo" else ("below", "inside", "above")
    assert min(found[sign, side] for sign in (True, False) for side in sides) >= 2, found


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("drift", [0, 1.2], ids=["on_policy", "off_policy"])
def test_kl_in_the_loss_adds_k3_or_with_bias_correction_ratio_times_k3(float64, tmp_path, drift, corrected):
    layout = Layout(1, 2, 4)
    update = first_update(layout, drift)
    values = OmegaConf.load(config_dir() / "kl" / "loss.yaml")
    if corrected:
        values.use_bias_correction_kl = True
    kl = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(KLConfig), values))
    loss = trl_loss(objective_arguments(preset("dr_grpo")[0], kl), update, layout, tmp_path)

    penalty = sum(((row.ratio if corrected else 1) * k3(row)).sum() for row in update.rows)
    expected = dr_grpo(update) + 1e-3 * penalty / (len(update.rows) * MAX_COMPLETION_LENGTH)
    assert_equal_loss_and_gradient(loss, expected, update)


@pytest.fixture(scope="module")
def tiny_policy(tmp_path_factory):
    """Save a random two-layer Qwen3 with a word-level tokenizer; return its folder."""
    folder = tmp_path_factory.mktemp("policy")
    words = ["<pad>", "<eos>", *"abcdefghijklmn"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return str(folder)


class RecordingTrainer(GRPOTrainer):
    """GRPOTrainer that records rewards, advantages and the largest log-ratio of each micro-batch."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.scored = []
        self.log_ratios = []
        self.has_reference = []

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        self.rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        return self.rewards

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        self.scored.append((self.rewards[:, 0], output["advantages"]))
        return output

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        self.forward = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        return self.forward

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        logps = self.forward[0].detach()
        # Without old log-probs TRL takes the ratio to be 1.
        log_ratio = logps - inputs.get("old_per_token_logps", logps)
        self.log_ratios.append((log_ratio * inputs["completion_mask"]).abs().max().item())
        self.has_reference.append("ref_per_token_logps" in inputs)
        return loss


def letters_reward(completion_ids, **_):
    return [float(sum(ids) % 7) for ids in completion_ids]


@pytest.fixture(scope="module")
def trained(tiny_policy, tmp_path_factory):
    """Return a function that trains a preset for two updates and returns its RecordingTrainer."""
    runs = {}

    def train(name):
        if name not in runs:
            args = make_po_config(
                name,
                per_device_train_batch_size=4,
                num_generations=4,
                max_completion_length=6,
                max_steps=2,
                learning_rate=1e-2,
                lr_scheduler_type="constant",
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
                output_dir=str(tmp_path_factory.mktemp(name)),
            )
            prompts = Dataset.from_dict({"prompt": ["a b c", "d e", "f", "g h i j"] * 8})
            runs[name] = RecordingTrainer(tiny_policy, letters_reward, args=args, train_dataset=prompts)
            runs[name].train()
        return runs[name]

    return train


@pytest.mark.parametrize("name", ["cispo", "dapo", "gspo", "sapo"])
def test_after_the_first_of_several_updates_per_generation_the_ratio_is_not_1(trained, name):
    before, after = trained(name).log_ratios
    assert before < 1e-5
    assert after > 1e-2


@pytest.mark.parametrize("name", ["bnpo", "dr_grpo", "grpo"])
def test_with_one_update_per_generation_the_ratio_is_exactly_1(trained, name):
    assert trained(name).log_ratios == [0.0, 0.0]


@pytest.mark.parametrize("name", PO_OBJECTIVES)
def test_advantages_are_divided_by_the_groups_standard_deviation_except_in_dr_grpo(trained, name):
    rewards, advantages = trained(name).scored[0]
    groups = rewards.double().view(-1, 4)
    expected = groups - groups.mean(1, keepdim=True)
    assert expected.abs().max() > 0.5
    if name != "dr_grpo":
        expected = expected / (groups.std(1, keepdim=True) + 1e-4)
    torch.testing.assert_close(advantages.double(), expected.view(-1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", PO_OBJECTIVES)
def test_only_grpo_among_the_published_objectives_loads_a_reference_policy(trained, name):
    assert trained(name).has_reference == [name == "grpo"] * 2
    assert (preset(name)[1].placement == KLPlacement.loss) == (name == "grpo")
