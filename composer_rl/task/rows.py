"""Rows of a task: the prompts that train and the prompts that measure must not meet."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from composer_rl.config import ConfigError
from composer_rl.rollout import message_text

EXAMPLES = 3
EXAMPLE_LENGTH = 80


def normalise_prompt(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """Text of a prompt (a string or a list of messages) in lower case, every run of white space one space.

    Roles are left out: a string and a user message that say the same are the same prompt.
    """
    texts = [prompt] if isinstance(prompt, str) else [message_text(message) for message in prompt]
    return " ".join(" ".join(texts).lower().split())


def check_disjoint(train_rows: Iterable[Mapping[str, Any]], heldout_rows: Iterable[Mapping[str, Any]]) -> None:
    """Raise ConfigError, with a count and up to three examples, when held-out prompts are also train prompts.

    Prompts are compared after `normalise_prompt`; repetition within either set is allowed.
    """
    train = {normalise_prompt(row["prompt"]) for row in train_rows}
    shared = list(dict.fromkeys(p for row in heldout_rows if (p := normalise_prompt(row["prompt"])) in train))
    if shared:
        examples = ", ".join(repr(prompt[:EXAMPLE_LENGTH]) for prompt in shared[:EXAMPLES])
        raise ConfigError(
            f"task.heldout: {len(shared)} prompt(s) are also in task.train, e.g. {examples};"
            " remove them from one of the two"
        )
