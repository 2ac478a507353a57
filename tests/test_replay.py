"""The replay channel: which pairs it takes, which tokens it trains, and its loss and gradient on the tiny policy."""

import copy
import json
import math
import os
import socket
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

import composer_rl
from composer_rl.channels.replay import ReplayChannel, ReplayConfig, ReplayMismatch, trained_ids
from composer_rl.config import ConfigError
from composer_rl.task.rows import normalise_prompt
from composer_rl.task.shop import Shop, _questions, make_rows

ASSETS = Path(composer_rl.__file__).parent / "assets"
PAIRS = ASSETS / "shop_pairs.jsonl"
TEMPERATURE = 0.7
# Far from any rounding, and far above the noise of the policy's own float32.
MOVED = 0.02


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def call(name, **arguments):
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def tool(text):
    return {"role": "tool", "name": "find", "content": text}


def pair(prompt="Ada wants 2 plums.", chosen="Total: 8", rejected="Total: 9", **more):
    return {"prompt": [user(prompt)], "chosen": [assistant(chosen)], "rejected": [assistant(rejected)], **more}


# Ragged: the sides' lengths differ within and between pairs.
RAGGED = [
    pair(weight=0.5),
    pair("What do two onions cost for Igor?", "Total: 12", "Total: 12 or 14 or 16 or 18", weight=2.0),
    pair("Please price 3 pears for Dana, who is in a hurry today.", "Sorry, I could not find the price.", "Total: 1"),
    {
        "prompt": [user("Ada wants 2 plums."), call("find", item="plum"), tool("G34")],
        "chosen": [call("price", sku="G34", quantity=2)],
        "rejected": [call("price", sku="plum", quantity=2)],
    },
    pair("How much is a melon?", "Total: 7", "Total: 70"),
]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(ASSETS / "tiny")


@pytest.fixture(scope="module")
def grpo(tmp_path_factory, tokenizer):
    """A real GRPOTrainer at a temperature that is not 1; tests do not change its weights."""
    return GRPOTrainer(
        str(ASSETS / "tiny"),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(
            output_dir=str(tmp_path_factory.mktemp("grpo")),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            temperature=TEMPERATURE,
            per_device_train_batch_size=2,
            num_generations=2,
            model_init_kwargs={"dtype": "float32"},
        ),
        train_dataset=Dataset.from_list(make_rows(2, 0, "train")),
        processing_class=tokenizer,
        environment_factory=Shop,
    )


@pytest.fixture(scope="module")
def moved(grpo):
    """A policy some way from the initial one."""
    policy = copy.deepcopy(grpo.model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += MOVED * torch.randn(parameter.shape, generator=generator)
    return policy


@pytest.fixture
def channel_of(tmp_path, tokenizer):
    def build(records, *, max_length=512, seed=0, chat_template=None, tokenizer=tokenizer, **config):
        path = tmp_path / "pairs.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return ReplayChannel.from_file(
            path, tokenizer, ReplayConfig(**config), seed=seed, max_length=max_length, chat_template=chat_template
        )

    return build


def gradient_of(policy, loss):
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(policy.parameters()))])


# --- what is trained ------------------------------------------------------------------------------------------------


def test_only_what_the_assistant_wrote_is_trained_up_to_its_end_of_turn(channel_of, tokenizer):
    (one,) = channel_of([pair()]).pairs
    assert tokenizer.decode(trained_ids(one.chosen)) == "Total: 8<|im_end|>"
    assert tokenizer.decode(trained_ids(one.rejected)) == "Total: 9<|im_end|>"
    assert one.chosen.input_ids[-1] == tokenizer.eos_token_id

    several = {
        "prompt": [user("Ada wants 2 plums.")],
        "chosen": [call("find", item="plum"), tool("G34"), assistant("Total: 8")],
        "rejected": [assistant("Total: 9"), user("Sure?"), assistant("Yes")],
    }
    (one,) = channel_of([several]).pairs
    found = '<tool_call>{"name": "find", "arguments": {"item": "plum"}}</tool_call><|im_end|>'
    assert tokenizer.decode(trained_ids(one.chosen)) == f"{found}Total: 8<|im_end|>"
    assert tokenizer.decode(trained_ids(one.rejected)) == "Total: 9<|im_end|>Yes<|im_end|>"


def test_the_prompt_is_tokenised_as_grpo_tokenises_it(channel_of, grpo, monkeypatch):
    # Which environment each row of the batch uses; the only one has no name.
    monkeypatch.setattr(grpo, "_batch_environments", [None], raising=False)
    (one,) = channel_of([RAGGED[3]]).pairs
    (prompt,) = grpo._tokenize_prompts([RAGGED[3]["prompt"]])[0]
    for side in (one.chosen, one.rejected):
        assert list(side.input_ids[: len(prompt)]) == prompt
        assert side.response_mask.index(1) == len(prompt)


REWRITES_HISTORY = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\nThink: {% endif %}"
)
MERGES = "{% for m in messages %}{{ m.content }} {% endfor %}"
FORGETS_FIRST_REPLY = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content if m.role == 'user' or loop.last else 'gone' }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("template", [REWRITES_HISTORY, MERGES])
def test_a_pair_whose_sides_do_not_continue_the_prompts_tokens_is_refused(channel_of, template):
    with pytest.raises(ConfigError, match=r"no usable pair in .*pairs.jsonl \(dropped: 1 prefix differs\)"):
        channel_of([pair("Ada", "wants 2", "wants 3")], chat_template=template)


def test_a_merge_across_the_boundary_is_what_the_merging_template_makes(tokenizer):
    prompt = tokenizer.apply_chat_template([user("Ada")], chat_template=MERGES, return_dict=False)
    whole = tokenizer.apply_chat_template([user("Ada"), user("wants")], chat_template=MERGES, return_dict=False)
    assert whole[: len(prompt)] != prompt


def test_a_template_that_rewrites_an_earlier_reply_drops_the_pair(channel_of):
    two_replies = {
        "prompt": [user("Ada wants 2 plums.")],
        "chosen": [assistant("Wait"), user("Go on"), assistant("Total: 8")],
        "rejected": [assistant("Total: 9")],
    }
    channel = channel_of([two_replies, pair()], chat_template=FORGETS_FIRST_REPLY)
    assert len(channel.pairs) == 1 and channel.dropped == {"prefix differs": 1}


# --- pairs that cannot teach ----------------------------------------------------------------------------------------

EMPTY = [
    {**pair(), "chosen": []},
    pair(chosen=" "),
    {**pair(), "rejected": [tool("G34")]},
    {**pair(), "rejected": [{"role": "assistant", "content": None}]},
]
# Neither white space at the ends nor a tool call comes through.
TRIMS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}" + (
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("record", EMPTY)
def test_an_empty_side_is_dropped_and_counted(channel_of, record):
    channel = channel_of([record, pair()])
    assert len(channel.pairs) == 1 and channel.dropped == {"empty side": 1}


def test_a_side_of_which_the_template_leaves_nothing_is_empty_too(channel_of):
    only_a_call = {**pair(), "chosen": [call("find", item="plum")]}
    channel = channel_of([only_a_call, pair()], chat_template=TRIMS)
    assert len(channel.pairs) == 1 and channel.dropped == {"empty side": 1}


def test_sides_that_are_equal_once_tokenised_are_dropped_and_counted(channel_of):
    channel = channel_of([pair(chosen="Total: 9"), pair(chosen="Total: 9 "), pair()], chat_template=TRIMS)
    assert len(channel.pairs) == 1 and channel.dropped == {"chosen equals rejected": 2}


def test_a_pair_longer_than_max_length_is_dropped_whole_never_cut(channel_of):
    length = max(len(side.input_ids) for p in channel_of([pair()]).pairs for side in (p.chosen, p.rejected))
    long_rejected = pair(rejected="Total: 9 or 10")
    channel = channel_of([pair(), long_rejected], max_length=length)
    assert len(channel.pairs) == 1 and channel.dropped == {f"longer than max_length={length}": 1}
    with pytest.raises(ConfigError, match=rf"dropped: 2 longer than max_length={length - 1}"):
        channel_of([pair(), long_rejected], max_length=length - 1)


def test_no_usable_pair_is_an_error_that_counts_the_reasons(channel_of):
    with pytest.raises(ConfigError, match=r"no usable pair .* \(dropped: 1 empty side, 1 chosen equals rejected\)"):
        channel_of([EMPTY[0], pair(chosen="Total: 9")])
    with pytest.raises(ConfigError, match=r"no usable pair .* the file is empty"):
        channel_of([])


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"prompt": [', "is not a JSON object in UTF-8"),
        ("[1]", "is not a JSON object but a list"),
        (json.dumps({key: pair()[key] for key in ("prompt", "chosen")}), "has no rejected"),
        (json.dumps({**pair(), "chosen": "Total: 8"}), "chosen must be a list of messages"),
        (json.dumps({**pair(), "chosen": [{"content": "Total: 8"}]}), "chosen must be a list of messages"),
        (json.dumps({**pair(), "prompt": [{"role": "user", "content": 3}]}), "prompt must be a list of messages"),
        (json.dumps({**pair(), "prompt": []}), "prompt is empty"),
        (json.dumps(pair(weight=0)), "weight=0 must be a finite number above 0"),
        (json.dumps(pair(weight=-1.0)), r"weight=-1.0 must be"),
        (json.dumps(pair(weight=math.nan)), "weight=nan must be"),
        (json.dumps(pair(weight=math.inf)), "weight=inf must be"),
        (json.dumps(pair(weight="1")), "weight=1 must be"),
        (json.dumps(pair(weight=True)), "weight=True must be"),
        (json.dumps(pair(chosen="\ud835")), "is not a JSON object in UTF-8"),
    ],
)
def test_a_broken_line_is_named_by_file_and_number(tmp_path, tokenizer, line, reason):
    path = tmp_path / "broken.jsonl"
    path.write_text(f"{json.dumps(pair())}\n\n{line}\n")
    with pytest.raises(ConfigError, match=rf"broken.jsonl:3: {reason}"):
        ReplayChannel.from_file(path, tokenizer, ReplayConfig(), seed=0, max_length=512)


def test_a_file_that_is_not_there_and_a_template_that_refuses_are_named(tmp_path, tokenizer, channel_of):
    with pytest.raises(ConfigError, match=r"replay: .*missing.jsonl cannot be read \(No such file"):
        ReplayChannel.from_file(tmp_path / "missing.jsonl", tokenizer, ReplayConfig(), seed=0, max_length=512)
    for template, reason in (("{{ raise_exception('no users') }}", "no users"), ("{{ 'a' + 1 }}", "can only concat")):
        with pytest.raises(ConfigError, match=rf"pairs.jsonl:1: the chat template refuses .* \({reason}"):
            channel_of([pair()], chat_template=template)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dpo_beta": 0.0}, "replay.dpo_beta=0.0: must be above 0"),
        ({"sft_weight": -1.0}, "replay.sft_weight=-1.0: must be at least 0"),
        ({"batch_size": 0}, "replay.batch_size=0: must be at least 1"),
        ({"loss": "hinge"}, "replay.loss=hinge: must be one of sigmoid, ipo, robust"),
        ({"loss": "robust", "flip_rate": 0.5}, "replay.flip_rate=0.5: must be at least 0 and below 0.5"),
        ({"flip_rate": 0.1}, "replay.flip_rate=0.1: has no effect with loss=sigmoid"),
    ],
)
def test_a_config_out_of_range_is_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        ReplayConfig(**values)


# --- loss and gradient ----------------------------------------------------------------------------------------------


def exact_logps(policy, side):
    """Summed log-prob of the response in float64: one unpadded row, plain logits over the temperature."""
    ids = torch.tensor([side.input_ids])
    logps = (policy(input_ids=ids).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
    chosen = logps.gather(1, ids[0, 1:, None])[:, 0]
    return (chosen * torch.tensor(side.response_mask[1:], dtype=torch.float64)).sum()


def exact_loss(channel, policy, initial):
    """Weighted sum of the pairs' losses, from the definitions."""
    config, total = channel.config, 0.0
    for one in channel.pairs:
        chosen, rejected = exact_logps(policy, one.chosen), exact_logps(policy, one.rejected)
        with torch.no_grad():
            chosen_ref, rejected_ref = exact_logps(initial, one.chosen), exact_logps(initial, one.rejected)
        lengths = sum(one.chosen.response_mask), sum(one.rejected.response_mask)
        margin = config.dpo_beta * ((chosen - chosen_ref) - (rejected - rejected_ref))
        if config.loss == "sigmoid":
            loss = torch.log1p(torch.exp(-margin))
        elif config.loss == "robust":
            rate = config.flip_rate
            right, wrong = torch.log1p(torch.exp(-margin)), torch.log1p(torch.exp(margin))
            loss = ((1 - rate) * right - rate * wrong) / (1 - 2 * rate)
        else:
            difference = (chosen - chosen_ref) / lengths[0] - (rejected - rejected_ref) / lengths[1]
            loss = (difference - 0.5 / config.dpo_beta) ** 2
        total = total + one.weight * (loss - config.sft_weight * chosen / lengths[0])
    return total


@pytest.mark.parametrize(
    "config",
    [
        {"loss": "sigmoid", "dpo_beta": 0.1},
        {"loss": "ipo", "dpo_beta": 2.0},
        {"loss": "robust", "dpo_beta": 0.1, "flip_rate": 0.2, "sft_weight": 0.5},
    ],
)
def test_loss_and_gradient_are_those_of_the_definition_in_float64(tmp_path, channel_of, grpo, moved, config):
    channel = channel_of(RAGGED, batch_size=len(RAGGED), **config)
    channel.prepare(grpo, tmp_path / "reference.safetensors")
    inputs = channel.batch(0, 0, 1, 0, 1, "cpu")
    assert inputs["dpo_window_weight"].item() == 5.5

    loss, _ = channel.loss(grpo, moved, inputs)
    plain = AutoModelForCausalLM.from_pretrained(ASSETS / "tiny").double()
    initial = copy.deepcopy(plain)
    plain.load_state_dict(moved.state_dict())
    exact = exact_loss(channel, plain, initial)
    # Sums of a few dozen float32 log-probs of up to 20 nats, each good to about 1e-6.
    assert loss.item() == pytest.approx(exact.item(), rel=1e-5)
    gradient, exact_gradient = gradient_of(moved, loss).double(), gradient_of(plain, exact)
    assert (gradient - exact_gradient).norm() < 1e-5 * exact_gradient.norm()


def test_policy_and_reference_log_probs_are_grpos_own(tmp_path, channel_of, grpo):
    channel = channel_of(RAGGED, batch_size=len(RAGGED))
    channel.prepare(grpo, tmp_path / "reference.safetensors")
    inputs = channel.batch(0, 0, 1, 0, 1, "cpu")
    for name in ("chosen", "rejected"):
        ids, mask = inputs[f"dpo_{name}_input_ids"], inputs[f"dpo_{name}_attention_mask"]
        with torch.no_grad():
            logps, _, _ = grpo._get_per_token_logps_and_entropies(grpo.model, ids, mask, ids.size(1) - 1)
        summed = (logps * inputs[f"dpo_{name}_response_mask"][:, 1:]).sum(-1)
        assert inputs[f"dpo_{name}_ref_logprobs"].tolist() == pytest.approx(summed.tolist(), rel=1e-5)

    loss, sums = channel.loss(grpo, grpo.model, inputs)
    assert loss.item() == pytest.approx(5.5 * math.log(2), rel=1e-5)
    assert abs(sums["chosen_logratio"].item()) < 1e-4 and abs(sums["margin"].item()) < 1e-5


def test_the_sums_for_logging_count_the_pairs_that_have_weight(tmp_path, channel_of, grpo, moved):
    channel = channel_of(RAGGED, batch_size=len(RAGGED))
    channel.prepare(grpo, tmp_path / "reference.safetensors")
    # Two micro-batches on one rank: the second holds two pairs and one of weight 0.
    inputs = [channel.batch(0, micro, 2, 0, 1, "cpu") for micro in range(2)]
    assert inputs[1]["dpo_weight"].tolist()[-1] == 0
    sums = [channel.loss(grpo, moved, batch)[1] for batch in inputs]
    total = {name: sum(part[name].item() for part in sums) for name in sums[0]}

    plain = AutoModelForCausalLM.from_pretrained(ASSETS / "tiny").double()
    initial = copy.deepcopy(plain)
    plain.load_state_dict(moved.state_dict())
    with torch.no_grad():
        ratios = [
            [(exact_logps(plain, side) - exact_logps(initial, side)).item() for side in (one.chosen, one.rejected)]
            for one in channel.pairs
        ]
    assert total == pytest.approx(
        {
            "pairs": 5,
            "weight": 5.5,
            "accuracy": sum(chosen > rejected for chosen, rejected in ratios),
            "margin": 0.1 * sum(chosen - rejected for chosen, rejected in ratios),
            "chosen_logratio": sum(chosen for chosen, _ in ratios),
            "rejected_logratio": sum(rejected for _, rejected in ratios),
        },
        rel=1e-4,
    )
    assert 0 < total["accuracy"] < 5
    assert not any(value.requires_grad for part in sums for value in part.values())


def test_neither_padding_nor_the_pad_token_matters(tmp_path, channel_of, grpo, moved, tokenizer):
    padded_with_eos = copy.deepcopy(tokenizer)
    padded_with_eos.pad_token = padded_with_eos.eos_token
    results = []
    for which in (tokenizer, padded_with_eos):
        channel = channel_of(RAGGED, batch_size=len(RAGGED), tokenizer=which)
        channel.prepare(grpo, tmp_path / f"{len(results)}.safetensors")
        inputs = channel.batch(0, 0, 1, 0, 1, "cpu")
        loss, _ = channel.loss(grpo, moved, inputs)
        results.append((inputs, loss.item(), gradient_of(moved, loss)))
    (plain, loss, gradient), (eos, eos_loss, eos_gradient) = results
    assert not torch.equal(plain["dpo_chosen_input_ids"], eos["dpo_chosen_input_ids"])
    # The end-of-turn token is trained although it is also the pad token.
    assert torch.equal(plain["dpo_chosen_response_mask"], eos["dpo_chosen_response_mask"])
    assert eos_loss == loss and torch.equal(gradient, eos_gradient)

    # On the left, where only the attention mask hides it: rotary positions are relative.
    for side in ((0, 9), (9, 0)):
        padded = {
            name: torch.nn.functional.pad(value, side) if value.ndim == 2 else value for name, value in plain.items()
        }
        padded_loss, _ = channel.loss(grpo, moved, padded)
        assert padded_loss.item() == pytest.approx(loss, rel=1e-5)
        assert (gradient_of(moved, padded_loss) - gradient).norm() < 1e-5 * gradient.norm()


def test_a_batch_without_weight_gives_a_finite_zero_attached_to_the_graph(tmp_path, channel_of, grpo, moved):
    channel = channel_of(RAGGED[:1], batch_size=1)
    channel.prepare(grpo, tmp_path / "reference.safetensors")
    inputs = channel.batch(0, 1, 2, 0, 1, "cpu")
    assert inputs["dpo_weight"].tolist() == [0.0] and inputs["dpo_window_weight"].item() == 0.5
    loss, sums = channel.loss(grpo, moved, inputs)
    assert loss.item() == 0 and all(value.item() == 0 for value in sums.values())
    assert torch.equal(gradient_of(moved, loss), torch.zeros(moved.num_parameters()))


def test_a_weight_scales_its_pair_and_not_the_update(tmp_path, channel_of, grpo, moved):
    def gradients_at(weight):
        channel = channel_of([{**RAGGED[1], "weight": weight}], batch_size=1)
        channel.prepare(grpo, tmp_path / "reference.safetensors")
        inputs = channel.batch(0, 0, 1, 0, 1, "cpu")
        gradient = gradient_of(moved, channel.loss(grpo, moved, inputs)[0])
        return gradient, gradient / inputs["dpo_window_weight"]

    (once, mean), (thrice, mean_of_thrice) = gradients_at(1.0), gradients_at(3.0)
    assert (thrice - 3 * once).norm() < 1e-5 * once.norm()
    assert (mean_of_thrice - mean).norm() < 1e-5 * mean.norm()


# --- which pairs, when and where ------------------------------------------------------------------------------------

LAYOUTS = [(1, 1), (4, 1), (8, 1), (1, 2), (2, 2), (4, 3)]
NUMBERED = [pair(f"Ada wants {number} plums.", weight=1.0 + number) for number in range(7)]


def indices_of(channel, step, accumulation=1, world_size=1):
    """Weights, which are unlike, of an update's pairs over all slots, those of weight 0 left out."""
    batches = [
        channel.batch(step, micro, accumulation, rank, world_size, "cpu")
        for micro in range(accumulation)
        for rank in range(world_size)
    ]
    assert len({batch["dpo_weight"].shape for batch in batches}) == 1
    weights = [weight for batch in batches for weight in batch["dpo_weight"].tolist() if weight > 0]
    assert {batch["dpo_window_weight"].item() for batch in batches} == {sum(weights)}
    return sorted(int(weight) - 1 for weight in weights)


@pytest.fixture
def numbered(channel_of):
    def build(seed=0, batch_size=3):
        channel = channel_of(NUMBERED, seed=seed, batch_size=batch_size)
        channel.reference = torch.zeros(len(NUMBERED), 2)
        return channel

    return build


def test_every_pair_comes_once_per_epoch_in_a_new_order(numbered):
    channel = numbered(batch_size=1)
    epochs = [[indices_of(channel, 7 * epoch + place)[0] for place in range(7)] for epoch in range(4)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_an_epoch_may_end_inside_an_update(numbered):
    channel = numbered(batch_size=3)
    seen = Counter(index for step in range(7) for index in indices_of(channel, step))
    assert seen == dict.fromkeys(range(7), 3)
    assert len(indices_of(numbered(batch_size=9), 0)) == 9


def test_the_pairs_of_an_update_follow_from_seed_and_step_alone(numbered):
    forwards, backwards = numbered(), numbered()
    taken = [indices_of(forwards, step) for step in range(10)]
    assert [indices_of(backwards, step) for step in reversed(range(10))] == taken[::-1]
    assert [indices_of(numbered(seed=1), step) for step in range(10)] != taken


@pytest.mark.parametrize(("accumulation", "world_size"), LAYOUTS)
def test_every_layout_sees_the_same_pairs_per_update(numbered, accumulation, world_size):
    for batch_size in (1, 3, 8):
        channel = numbered(batch_size=batch_size)
        for step in range(5):
            assert indices_of(channel, step, accumulation, world_size) == indices_of(channel, step)


def test_every_layout_gives_the_same_gradient(tmp_path, channel_of, grpo, moved):
    channel = channel_of(NUMBERED[:3] + RAGGED, batch_size=8)
    channel.prepare(grpo, tmp_path / "reference.safetensors")

    def update_gradient(accumulation, world_size):
        total = 0.0
        for micro in range(accumulation):
            for rank in range(world_size):
                inputs = channel.batch(3, micro, accumulation, rank, world_size, "cpu")
                loss, _ = channel.loss(grpo, moved, inputs)
                # What the trainer adds per rank, averaged over ranks as DDP does.
                term = loss * world_size / inputs["dpo_window_weight"]
                total = total + gradient_of(moved, term) / world_size
        return total

    whole = update_gradient(1, 1)
    assert whole.norm() > 1e-3
    for layout in [(8, 1), (4, 1), (4, 2), (1, 2), (5, 1)]:
        assert (update_gradient(*layout) - whole).norm() < 1e-5 * whole.norm(), layout


def test_a_batch_before_the_reference_is_refused(channel_of):
    with pytest.raises(RuntimeError, match="call prepare first"):
        channel_of([pair()]).batch(0, 0, 1, 0, 1, "cpu")


# --- the reference --------------------------------------------------------------------------------------------------


@pytest.fixture
def forwards(grpo):
    """Counts the forwards of the trainer's model."""
    calls = []
    handle = grpo.model.model.register_forward_hook(lambda *_: calls.append(grpo.model.training))
    yield calls
    handle.remove()


def test_the_reference_is_computed_once_in_eval_mode_and_then_read(tmp_path, channel_of, grpo, forwards):
    cache = tmp_path / "reference.safetensors"
    first, second = channel_of(RAGGED), channel_of(RAGGED)
    grpo.model.train()
    first.prepare(grpo, cache)
    # Two pairs per forward, as many as rows in a micro-batch.
    assert forwards == [False] * 3 and grpo.model.training
    for must_exist in (False, True):
        second.prepare(grpo, cache, must_exist=must_exist)
        assert len(forwards) == 3 and torch.equal(first.reference, second.reference)
    assert [path.name for path in tmp_path.glob("*.safetensors*")] == ["reference.safetensors"]


def trainer_like(grpo, *, model=None, precision=None, **args):
    """A trainer like grpo with another model, precision or other arguments."""
    accelerator = SimpleNamespace(is_main_process=True, mixed_precision=precision) if precision else grpo.accelerator
    args = SimpleNamespace(**vars(grpo.args) | args)
    return SimpleNamespace(model=model or grpo.model, accelerator=accelerator, args=args)


def test_a_cache_of_something_else_is_refused_and_names_it(tmp_path, channel_of, grpo, moved, tokenizer):
    cache = tmp_path / "reference.safetensors"
    channel_of(RAGGED).prepare(grpo, cache)
    written = cache.read_bytes()

    other_template = tokenizer.chat_template + "{# another #}"
    other_tokenizer = copy.deepcopy(tokenizer)
    other_tokenizer.add_tokens("another")
    other_config = copy.deepcopy(grpo.model)
    other_config.config.rms_norm_eps = 1e-5
    for other, channel, trainer in (
        ("model", channel_of(RAGGED), trainer_like(grpo, model=moved)),
        ("model configuration", channel_of(RAGGED), trainer_like(grpo, model=other_config)),
        ("tokenizer", channel_of(RAGGED, tokenizer=other_tokenizer), grpo),
        ("chat template", channel_of(RAGGED, chat_template=other_template), grpo),
        ("set of pairs", channel_of(RAGGED[1:]), grpo),
        ("set of pairs", channel_of([*RAGGED[:-1], pair()]), grpo),
        ("set of pairs", channel_of([RAGGED[0], *RAGGED[:0:-1]]), grpo),
        ("sampling temperature", channel_of(RAGGED), trainer_like(grpo, temperature=1.0)),
        ("precision", channel_of(RAGGED), trainer_like(grpo, precision="bf16")),
    ):
        with pytest.raises(ReplayMismatch, match=rf"holds the reference log-probs of another {other};"):
            channel.prepare(trainer, cache)
    assert cache.read_bytes() == written


def replay_rank(rank, port, records, folder):
    """One of two ranks; only the main one sees a cache in its folder."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(ASSETS / "tiny")
    add_fused_lm_head(model, temperature=TEMPERATURE)
    args = SimpleNamespace(temperature=TEMPERATURE, cast_lm_head_to_fp32=False, per_device_train_batch_size=2)
    trainer = SimpleNamespace(model=model, accelerator=Accelerator(cpu=True), args=args)
    channel = ReplayChannel.from_file(
        records, AutoTokenizer.from_pretrained(ASSETS / "tiny"), ReplayConfig(batch_size=5), seed=0, max_length=512
    )
    calls = []
    model.model.register_forward_hook(lambda *_: calls.append(None))
    cache = folder / str(rank) / "reference.safetensors"
    channel.prepare(trainer, cache)
    found = {"reference": channel.reference, "forwards": len(calls)}
    channel.prepare(trainer, cache)
    found["reused"] = len(calls) == found["forwards"]
    args.temperature = 1.0
    try:
        channel.prepare(trainer, cache)
    except ReplayMismatch as error:
        found["refused"] = str(error)
    torch.save(found, folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_ranks_share_the_work_and_the_decision(tmp_path, channel_of, grpo):
    alone = channel_of(RAGGED)
    alone.prepare(grpo, tmp_path / "alone.safetensors")
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(replay_rank, (port, tmp_path / "pairs.jsonl", tmp_path), nprocs=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert torch.equal(ranks[0]["reference"], ranks[1]["reference"])
    assert ranks[0]["reference"].flatten().tolist() == pytest.approx(alone.reference.flatten().tolist(), rel=1e-5)
    # Five pairs on two ranks by two: as many forwards on the rank that has one pair less.
    assert [rank["forwards"] for rank in ranks] == [2, 2]
    assert all(rank["reused"] and "another sampling temperature" in rank["refused"] for rank in ranks)
    assert not list((tmp_path / "1").iterdir())


def test_a_resumed_policy_may_differ_from_the_reference_but_its_pairs_may_not(tmp_path, channel_of, grpo, moved):
    cache = tmp_path / "reference.safetensors"
    first = channel_of(RAGGED)
    first.prepare(grpo, cache)
    resumed = channel_of(RAGGED)
    resumed.prepare(trainer_like(grpo, model=moved), cache, must_exist=True)
    assert torch.equal(resumed.reference, first.reference)
    with pytest.raises(ReplayMismatch, match="another set of pairs"):
        channel_of(RAGGED[1:]).prepare(trainer_like(grpo, model=moved), cache, must_exist=True)


def test_a_missing_or_broken_cache_is_not_refilled_from_resumed_weights(tmp_path, channel_of, grpo, forwards):
    cache = tmp_path / "reference.safetensors"
    with pytest.raises(ReplayMismatch, match=r"reference.safetensors is missing, and .* start a new run"):
        channel_of(RAGGED).prepare(grpo, cache, must_exist=True)
    cache.write_bytes(b"cut off")
    with pytest.raises(ReplayMismatch, match=r"reference.safetensors cannot be read"):
        channel_of(RAGGED).prepare(grpo, cache, must_exist=True)
    assert not forwards and cache.read_bytes() == b"cut off"


def test_a_failing_forward_leaves_the_mode_as_it_was_and_no_file(tmp_path, channel_of, grpo):
    def fail(*_):
        raise RuntimeError("out of memory")

    grpo.model.train()
    handle = grpo.model.model.register_forward_hook(fail)
    try:
        with pytest.raises(RuntimeError, match="out of memory"):
            channel_of(RAGGED).prepare(grpo, tmp_path / "reference.safetensors")
    finally:
        handle.remove()
    assert grpo.model.training and not list(tmp_path.glob("*.safetensors*"))


def test_the_reference_of_a_lora_policy_is_its_base(tmp_path, channel_of, grpo):
    peft = pytest.importorskip("peft")
    base = channel_of(RAGGED)
    base.prepare(grpo, tmp_path / "base.safetensors")

    policy = peft.get_peft_model(copy.deepcopy(grpo.model), peft.LoraConfig(target_modules=["q_proj", "v_proj"]))
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter += 1.0
    trainer = trainer_like(grpo, model=policy)
    adapted = channel_of(RAGGED, batch_size=len(RAGGED))
    adapted.prepare(trainer, tmp_path / "lora.safetensors")
    assert adapted.reference.flatten().tolist() == pytest.approx(base.reference.flatten().tolist(), rel=1e-6)
    # And back on: the policy itself is far from that.
    _, sums = adapted.loss(trainer, policy, adapted.batch(0, 0, 1, 0, 1, "cpu"))
    assert abs(sums["chosen_logratio"].item()) > 1.0


# --- the embedded pairs ---------------------------------------------------------------------------------------------


def canonical(messages):
    (message,) = messages
    calls = [[c["function"]["name"], c["function"]["arguments"]] for c in message.get("tool_calls") or []]
    return json.dumps([calls, message["content"]], sort_keys=True)


@pytest.fixture(scope="module")
def embedded():
    return [json.loads(line) for line in PAIRS.read_text().splitlines()]


def test_the_embedded_pairs_are_all_usable(tokenizer):
    channel = ReplayChannel.from_file(PAIRS, tokenizer, ReplayConfig(), seed=0, max_length=512)
    assert len(channel.pairs) >= 300 and channel.dropped == {}
    assert PAIRS.stat().st_size < 400_000


def test_no_embedded_pair_asks_a_held_out_question(embedded):
    asked = {normalise_prompt(record["prompt"][:1]) for record in embedded}
    assert not asked & {normalise_prompt(question) for question, *_ in _questions("heldout")}
    assert asked <= {normalise_prompt(question) for question, *_ in _questions("train")}


def test_the_embedded_expert_is_right_where_the_policy_did_something_else(embedded):
    row_of = {question: (item, quantity) for question, _, item, quantity in _questions("train")}
    kinds = Counter()
    for record in embedded:
        assert canonical(record["chosen"]) != canonical(record["rejected"])
        item, quantity = row_of[record["prompt"][0]["content"]]
        sku = total = None
        for turn, result in zip(record["prompt"][1::2], record["prompt"][2::2], strict=True):
            (made,) = (c["function"] for c in turn["tool_calls"])
            if not result["content"].startswith("{'error'"):
                sku = result["content"] if made["name"] == "find" else sku
                if made["name"] == "price" and str(made["arguments"]["quantity"]) == str(quantity):
                    total = result["content"]
        if sku is None:
            right = call("find", item=item)
        elif total is None:
            right = call("price", sku=sku, quantity=quantity)
        else:
            right = assistant(f"Total: {total}")
        assert canonical(record["chosen"]) == canonical([right])
        kinds[sku is None, total is None] += 1
    assert len(kinds) == 3 and min(kinds.values()) >= 20
