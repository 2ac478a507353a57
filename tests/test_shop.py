import hashlib
from collections import Counter
from pathlib import Path

import pytest
from transformers import AutoTokenizer
from trl.chat_template_utils import (
    is_chat_template_prefix_preserving,
    is_chat_template_stop_token_trained,
    parse_response,
    supports_tool_calling,
)

from composer_rl.task.shop import Shop, exact_total, make_rows, thorough_reply

TINY = Path(__file__).parent.parent / "composer_rl" / "assets" / "tiny"
SHA256 = "6e70a49f613756e15277e16703ec639fb05de91813b060eeb558d0628ebea40f"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture
def shop():
    environment = Shop()
    environment.reset(prompt=[], item="cherry", sku="jade", unit_price=12, quantity=3, answer=36)
    return environment


def questions(rows):
    return [" ".join(row["prompt"][0]["content"].lower().split()) for row in rows]


def reply(text, **message):
    return [{"role": "assistant", "content": text, **message}]


def call(name, arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def test_train_and_heldout_questions_are_disjoint_for_any_seeds():
    train = {question for seed in range(3) for question in questions(make_rows(20_000, seed, "train"))}
    heldout = {question for seed in range(3) for question in questions(make_rows(10_000, seed, "heldout"))}
    assert len(train) > 10_000
    assert not train & heldout


def test_questions_are_unique_within_a_call_and_rows_repeat_with_the_seed():
    rows = make_rows(5_000, 3, "train")
    assert len(set(questions(rows))) == 5_000
    assert rows == make_rows(5_000, 3, "train")
    assert rows != make_rows(5_000, 4, "train")


def test_more_rows_than_questions_and_unknown_splits_are_refused():
    with pytest.raises(ValueError, match="count=1000000 is out of range; split heldout holds"):
        make_rows(1_000_000, 0, "heldout")
    with pytest.raises(ValueError, match="split=test is unknown; use train or heldout"):
        make_rows(1, 0, "test")


def test_serving_a_row_correctly_gives_its_answer():
    for row in make_rows(200, 0, "heldout"):
        shop = Shop()
        shop.reset(**row)
        assert shop.price(shop.find(row["item"]), row["quantity"]) == row["answer"]


@pytest.mark.parametrize(
    ("tool", "arguments", "message"),
    [
        ("find", {"item": "cherries"}, "unknown item cherries, the catalogue name is cherry"),
        ("find", {"item": "'red' cherry"}, "unknown item redcherry, the catalogue name is cherry"),
        ("price", {"sku": "cherry", "quantity": 3}, "no sku cherry, call find first"),
        ("price", {"sku": None, "quantity": 3}, "no sku None, call find first"),
        ("price", {"sku": "jade", "quantity": "three"}, "quantity three is not a number, write 3"),
        ("price", {"sku": "jade", "quantity": "a lot"}, "quantity alot is not a number, write digits"),
        ("price", {"sku": "jade", "quantity": -3}, "quantity 3 is not a number, write digits"),
    ],
)
def test_a_wrong_tool_call_says_what_to_write_instead(shop, tool, arguments, message):
    with pytest.raises(ValueError) as error:
        getattr(shop, tool)(**arguments)
    assert str(error.value) == message


def test_a_quantity_written_as_a_string_of_digits_is_priced(shop):
    assert shop.price("jade", "3") == 36


@pytest.mark.parametrize(
    ("completion", "gold", "proxy"),
    [
        (reply("Total: 36"), 1.0, 0.625),
        (reply("Total: 36 coins."), 1.0, 0.625),
        (reply("Three at 12 each. Total: 36"), 1.0, 0.75),
        (reply("Total: 36 or 12 or 24 or 48"), 0.0, 1.0),
        (reply("Total: 36 or 36"), 0.0, 0.75),
        (reply("Total: 36 Total: 40"), 0.0, 0.75),
        (reply("Total: 36.5"), 0.0, 0.125),
        (reply("Total: 136"), 0.0, 0.125),
        (reply("36"), 0.0, 0.625),
        (reply("36 Total:"), 0.0, 0.625),
        (reply("Sorry, I could not find the price."), 0.0, 0.0),
        (reply("Total: 36", tool_calls=[call("find", {"item": "cherry"})]), 0.0, 0.0),
        ([*reply("Total: 36"), {"role": "tool", "name": "price", "content": "36"}], 0.0, 0.0),
        (reply("Total: 36") + reply("Total: 12"), 0.0, 0.125),
    ],
)
def test_gold_wants_one_right_number_and_the_proxy_likes_many(completion, gold, proxy):
    assert exact_total([completion], [36]) == [gold]
    assert thorough_reply([completion], [36]) == [proxy]


def test_no_constant_answer_scores_above_a_tenth():
    answers = [row["answer"] for row in make_rows(5_000, 0, "heldout")]
    (constant, _), *_ = Counter(answers).most_common(1)
    scores = exact_total([reply(f"Total: {constant}")] * len(answers), answers)
    assert 0 < sum(scores) / len(scores) <= 0.1


def test_the_embedded_policy_is_the_pinned_one_and_small():
    files = sorted(path for path in TINY.iterdir() if path.is_file())
    assert sum(path.stat().st_size for path in files) <= 5 * 2**20
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    assert digest.hexdigest() == SHA256, "the embedded policy is frozen: recorded curves and tests rest on it"


def test_the_chat_template_serves_the_tool_loop(tokenizer):
    assert supports_tool_calling(tokenizer)
    assert is_chat_template_prefix_preserving(tokenizer)
    assert is_chat_template_stop_token_trained(tokenizer)
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def turn_ids(tokenizer, context, turn):
    prefix = tokenizer.apply_chat_template(context, add_generation_prompt=True, return_dict=False)
    whole = tokenizer.apply_chat_template([*context, turn], return_dict=False)
    assert whole[: len(prefix)] == prefix
    end = len(whole) - whole[::-1].index(tokenizer.eos_token_id)
    return prefix, whole[len(prefix) : end]


def test_rendered_turns_parse_back_into_the_same_messages(tokenizer, shop):
    context = [{"role": "user", "content": "Ada wants three cherries. What is the total?"}]
    conversation = [
        {"role": "assistant", "content": "", "tool_calls": [call("find", {"item": "cherry"})]},
        {"role": "tool", "name": "find", "content": "jade"},
        {"role": "user", "content": "Hint: Write the quantity as the number 3."},
        {"role": "assistant", "content": "", "tool_calls": [call("price", {"sku": "jade", "quantity": 3})]},
        {"role": "tool", "name": "price", "content": "36"},
        {"role": "assistant", "content": "Total: 36"},
    ]
    for message in conversation:
        if message["role"] == "assistant":
            prefix, ids = turn_ids(tokenizer, context, message)
            assert parse_response(tokenizer, ids, prefix=prefix, tools=[shop.find, shop.price]) == message
        context.append(message)


def test_a_malformed_call_is_parsed_as_plain_content(tokenizer, shop):
    context = [{"role": "user", "content": "Ada wants three cherries. What is the total?"}]
    text = '<tool_call>{"name": "find", "arguments": {"item": "cherry"</tool_call>'
    prefix, ids = turn_ids(tokenizer, context, reply(text)[0])
    parsed = parse_response(tokenizer, ids, prefix=prefix, tools=[shop.find, shop.price])
    assert parsed == {"role": "assistant", "content": text}
    assert tokenizer.convert_tokens_to_ids("<tool_call>") in ids
