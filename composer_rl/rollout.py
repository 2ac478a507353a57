"""What happened in a rollout, read from the messages and the tool mask that TRL generated."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

TOOL_CALL_OPEN = "<tool_call>"
# How GRPOTrainer._tool_call_loop renders an exception of a tool: str({"error": ...}).
RAISED = "{'error': "
# What hint rules read for a tool call that does not parse, which has no tool result.
MALFORMED_ERROR = "malformed tool call"

Completion = str | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Rollout:
    """Counts of one completion: assistant messages, tool results, tool errors, calls that do not parse."""

    turns: int
    tool_results: int
    tool_errors: int
    malformed_calls: int


def read_rollout(completion: Completion, error_pattern: re.Pattern[str]) -> Rollout:
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


def has_tool_error(completion: Completion, error_pattern: re.Pattern[str]) -> bool:
    """Whether any tool result of the completion is an error."""
    return read_rollout(completion, error_pattern).tool_errors > 0


def message_text(message: Mapping[str, Any]) -> str:
    """Text of a message, whose content is a string, a list of typed blocks, or absent beside a tool call."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(block["text"] for block in content if block["type"] == "text")


@dataclass(frozen=True)
class ErrorTurn:
    """A model turn that went wrong: its place among the completion's tokens and what it was told."""

    # raised (its tool raised), pattern (a tool result matched), malformed (its call does not parse), score.
    kind: str
    # Completion token span [start, end).
    start: int
    end: int
    error: str
    # Span of the model turn before it, when that one was no error.
    before: tuple[int, int] | None


def model_turns(tool_mask: Sequence[int]) -> list[tuple[int, int]]:
    """Return the spans [start, end) of model tokens: the runs of ones in TRL's tool mask."""
    edges = [0, *(i for i in range(1, len(tool_mask)) if tool_mask[i] != tool_mask[i - 1]), len(tool_mask)]
    return [(start, end) for start, end in pairwise(edges) if end > start and tool_mask[start]]


def find_error_turns(
    completion: Sequence[Mapping[str, Any]], tool_mask: Sequence[int], error_pattern: re.Pattern[str]
) -> tuple[list[ErrorTurn], int]:
    """Return the error turns of a multi-turn rollout, in order, and the number of calls whose results are missing.

    TRL rolls back the tool results that would overrun the length cap, and runs no more calls after the last
    allowed round; such a turn has calls but no results, and whether it erred is unknown.
    Raises ValueError when messages and mask disagree on the number of turns.
    """
    spans = model_turns(tool_mask)
    starts = [place for place, message in enumerate(completion) if message["role"] == "assistant"]
    if len(starts) != len(spans):
        raise ValueError(f"{len(starts)} assistant messages but {len(spans)} runs of model tokens in the tool mask")
    errors: list[ErrorTurn] = []
    unanswered = 0
    sound: tuple[int, int] | None = None
    for start, stop, span in zip(starts, [*starts[1:], len(completion)], spans, strict=True):
        turn = completion[start]
        results = [message_text(message) for message in completion[start + 1 : stop]]
        failed = next((r for r in results if r.startswith(RAISED) or error_pattern.search(r)), None)
        if turn.get("tool_calls"):
            kind = None if failed is None else "raised" if failed.startswith(RAISED) else "pattern"
            unanswered += not results
        else:
            failed = MALFORMED_ERROR if TOOL_CALL_OPEN in message_text(turn) else None
            kind = "malformed" if failed else None
        if kind is not None and failed is not None:
            errors.append(ErrorTurn(kind, *span, error=failed, before=sound))
        sound = span if kind is None else None
    return errors, unanswered
