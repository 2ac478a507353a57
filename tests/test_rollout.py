"""Reading what happened in a rollout from its messages."""

import re

from composer_rl.rollout import Rollout, has_tool_error, read_rollout

ERROR = re.compile(r"^\{'error': ")


def called(name: str, **arguments: object) -> dict[str, object]:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def test_turns_results_and_errors_are_counted() -> None:
    completion = [
        called("find", item="pears"),
        {"role": "tool", "name": "find", "content": "{'error': 'unknown item pears'}"},
        called("find", item="pear"),
        {"role": "tool", "name": "find", "content": "K47"},
        {"role": "tool", "name": "find", "content": "the word {'error': is not at the start"},
        {"role": "assistant", "content": "Total: 36"},
    ]
    assert read_rollout(completion, ERROR) == Rollout(turns=3, tool_results=3, tool_errors=1, malformed_calls=0)
    assert has_tool_error(completion, ERROR)
    assert not has_tool_error(completion[2:], ERROR)


def test_only_tool_results_can_be_tool_errors() -> None:
    completion = [{"role": "assistant", "content": "{'error': 'I say so'}"}]
    assert read_rollout(completion, ERROR).tool_errors == 0


def test_a_call_that_stayed_text_is_malformed_and_a_parsed_one_is_not() -> None:
    broken = {"role": "assistant", "content": '<tool_call>{"name": "find"</tool_call>'}
    parsed = {**called("find", item="pear"), "content": "I call <tool_call> now"}
    assert read_rollout([parsed, broken], ERROR).malformed_calls == 1
    assert read_rollout([{"role": "user", "content": "<tool_call>"}], ERROR).malformed_calls == 0


def test_content_blocks_are_read_as_their_text() -> None:
    blocks = [{"type": "image", "image": None}, {"type": "text", "text": "{'error': 'no light'}"}]
    assert has_tool_error([{"role": "tool", "name": "see", "content": blocks}], ERROR)


def test_a_plain_completion_is_one_turn() -> None:
    assert read_rollout("Total: 36", ERROR) == Rollout(turns=1, tool_results=0, tool_errors=0, malformed_calls=0)
    assert read_rollout("<tool_call>", ERROR).malformed_calls == 1
