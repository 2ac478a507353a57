"""TaskConfig -> the rows, rewards and environment of a run, each mistake one ConfigError."""

import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from composer_rl.config import ConfigError, TaskConfig
from composer_rl.task.rows import check_disjoint

Row = dict[str, Any]
RewardFunction = Callable[..., Any]


@dataclass(frozen=True)
class Task:
    """What a task contributes to a run."""

    train_rows: list[Row]
    heldout_rows: list[Row]
    environment: type | None
    # In the order of task.rewards; each carries its config name as __name__, which TRL logs it under.
    rewards: list[RewardFunction]
    reward_weights: list[float]
    gold: RewardFunction


def load_task(config: TaskConfig) -> Task:
    """Import and call what the task config names.

    Raises ConfigError for a path that cannot be imported, arguments that do not fit, rows without a prompt, and
    held-out prompts that are also train prompts.
    """
    train_rows = _rows("task.train", config.train)
    heldout_rows = _rows("task.heldout", config.heldout)
    check_disjoint(train_rows, heldout_rows)
    rewards = {
        name: bind_reward(name, _import(f"task.rewards.{name}.function", reward.function), reward.arguments)
        for name, reward in config.rewards.items()
    }
    environment = None
    if config.environment is not None:
        environment = _import("task.environment", config.environment)
        if not inspect.isclass(environment) or not hasattr(environment, "reset"):
            raise ConfigError(f"task.environment={config.environment}: must be a class with a reset method")
    return Task(
        train_rows=train_rows,
        heldout_rows=heldout_rows,
        environment=environment,
        rewards=list(rewards.values()),
        reward_weights=[reward.weight for reward in config.rewards.values()],
        gold=rewards[config.gold],
    )


def tool_names(environment: type | None) -> list[str]:
    """Return the names of an environment's tools, as TRL takes them: its public methods but reset and get_reward."""
    if environment is None:
        return []
    methods = inspect.getmembers(environment, predicate=inspect.isfunction)
    return [name for name, _ in methods if not name.startswith("_") and name not in ("reset", "get_reward")]


def environment_tools(environment: type | None, row: Row) -> list[Any] | None:
    """Return the tools of a fresh environment reset to `row`, bound to it; None for a single-turn task."""
    if environment is None:
        return None
    instance = environment()
    instance.reset(**row)
    return [getattr(instance, name) for name in tool_names(environment)]


def bind_reward(name: str, function: RewardFunction, arguments: dict[str, Any]) -> RewardFunction:
    """Return `function` with `arguments` bound and `name` as its __name__, async when it is."""
    reward: RewardFunction
    if inspect.iscoroutinefunction(function):

        async def reward(**kwargs: Any) -> Any:
            return await function(**arguments, **kwargs)

    else:

        def reward(**kwargs: Any) -> Any:
            return function(**arguments, **kwargs)

    reward.__name__ = name
    return reward


def _rows(key: str, leaf: dict[str, Any]) -> list[Row]:
    """Call a `_target_` leaf that returns rows."""
    arguments = dict(leaf)
    target = arguments.pop("_target_", None)
    if target is None:
        raise ConfigError(f"{key}: needs a _target_, the dotted path of a callable that returns rows")
    function = _import(f"{key}._target_", target)
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise ConfigError(f"{key}: {target} {error}") from None
    try:
        rows = list(function(**arguments))
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from error
    if not rows:
        raise ConfigError(f"{key}: {target} returned no rows")
    for number, row in enumerate(rows):
        if "prompt" not in row:
            raise ConfigError(f"{key}: row {number} has no prompt; it has {', '.join(row)}")
    return rows


def _import(key: str, path: str) -> Any:
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{key}={path}: cannot be imported ({error})") from error
