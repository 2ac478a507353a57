"""What happened in a rollout, read from the messages that TRL generated."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TOOL_CALL_OPEN = "<tool_call>"


@dataclass(frozen=True)
class Rollout:
    """Counts of one completion: assistant messages, tool results, tool errors, calls that do not parse."""

    turns: int
    tool_results: int
    tool_errors: int
    malformed_calls: int


def read_rollout(completion: str | Sequence[Mapping[str, Any]], error_pattern: re.Pattern[str]) -> Rollout:
    """Read the completion of one rollout, a list of messages or the text of a plain completion (one turn).

    A tool result is an error when `error_pattern` is found in its text. TRL keeps a tool call that it cannot
    parse as the content of its message, so such a call is a message that opens one and carries none.
    """
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    turns = [message for message in completion if message["role"] == "assistant"]
    results = [message_text(message) for message in completion if message["role"] == "tool"]
    return Rollout(
        turns=len(turns),
        tool_results=len(results),
        tool_errors=sum(error_pattern.search(result) is not None for result in results),
        malformed_calls=sum(TOOL_CALL_OPEN in message_text(turn) and not turn.get("tool_calls") for turn in turns),
    )


def has_tool_error(completion: str | Sequence[Mapping[str, Any]], error_pattern: re.Pattern[str]) -> bool:
    """Whether any tool result of the completion is an error."""
    return read_rollout(completion, error_pattern).tool_errors > 0


def message_text(message: Mapping[str, Any]) -> str:
    """Text of a message, whose content is a string, a list of typed blocks, or absent beside a tool call."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(block["text"] for block in content if block["type"] == "text")
