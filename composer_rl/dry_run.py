"""`dry_run=true`: everything short of training, on the CPU, with what it found printed."""

import inspect
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from composer_rl.arguments import planned_steps, require_rows, training_arguments
from composer_rl.config import BatchPlan, ConfigError, Dtype, KLPlacement, RunConfig, plan_batch
from composer_rl.model import count_parameters, load_tokenizer
from composer_rl.report.terminal import print_banner
from composer_rl.task.load import Row, Task, environment_tools, load_task

BYTES = {Dtype.float32: 4, Dtype.bfloat16: 2, Dtype.float16: 2}


def dry_run(run: RunConfig) -> None:
    """Check every input of a run, run each reward once, and print the plan; no weights are loaded.

    Raises ConfigError for whatever would stop the run later.
    """
    console = Console()
    plan = plan_batch(run)
    task = load_task(run.task)
    require_rows(len(task.train_rows), plan)
    tokenizer = load_tokenizer(run.model, tools=task.environment is not None)
    parameters = count_parameters(run.model)
    with tempfile.TemporaryDirectory() as folder:
        args = training_arguments(run, plan, Path(folder), task.reward_weights, use_cpu=True)
    steps = args.max_steps if args.max_steps > 0 else planned_steps(len(task.train_rows), plan, run)

    row = task.train_rows[0]
    console.rule("first prompt as the policy sees it")
    console.print(render_prompt(row, task, tokenizer), markup=False, highlight=False)
    console.rule("rewards on a canned completion")
    for name, value in canned_rewards(row, task).items():
        console.print(f"{name}: {value}", markup=False)
    console.rule("plan")
    print_banner(console, run, plan, steps, len(task.heldout_rows), gpu=False)
    for line in describe_cost(run, plan, parameters):
        console.print(line, markup=False, highlight=False)
    console.print("dry run: nothing was trained and nothing was written", highlight=False)


def render_prompt(row: Row, task: Task, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of a row's prompt after the chat template, tools included.

    Raises ConfigError when the template or a tool's docstring does not allow it.
    """
    try:
        return str(
            tokenizer.apply_chat_template(
                row["prompt"],
                tools=environment_tools(task.environment, row),
                add_generation_prompt=True,
                tokenize=False,
            )
        )
    except Exception as error:
        raise ConfigError(f"task.train: the first prompt cannot be rendered ({error})") from error


def canned_rewards(row: Row, task: Task) -> dict[str, Any]:
    """Call each reward function once, on a one-line reply to `row`, and return what they gave by name.

    Raises ConfigError naming the reward that fails or that does not return one number.
    """
    columns = {key: [value] for key, value in row.items() if key != "prompt"}
    completion = [{"role": "assistant", "content": "A canned reply."}]
    results: dict[str, Any] = {}
    for reward in task.rewards:
        name = reward.__name__
        if inspect.iscoroutinefunction(reward):
            results[name] = "asynchronous; called in training only"
            continue
        try:
            values = reward(prompts=[row["prompt"]], completions=[completion], completion_ids=[[0]], **columns)
        except Exception as error:
            raise ConfigError(f"task.rewards.{name}: fails on a canned completion ({error!r})") from error
        if not hasattr(values, "__len__") or len(values) != 1:
            raise ConfigError(f"task.rewards.{name}: returned {values!r} for one completion; return a list of one")
        results[name] = values[0]
    return results


def describe_cost(run: RunConfig, plan: BatchPlan, parameters: int) -> list[str]:
    """Return what a run costs: forwards per generation and memory of weights, gradients and optimizer per rank."""
    reference = run.kl.placement != KLPlacement.none
    # TRL keeps the sampling policy's log-probs when updates make it another; the KL in the reward always needs them.
    sampling = plan.updates > 1 or run.kl.placement == KLPlacement.reward
    passes = [f"{plan.steps_per_generation * run.objective.num_iterations} forward-backward"]
    if sampling:
        passes.append("1 for the sampling policy's log-probs")
    if reference:
        passes.append("1 for the reference's log-probs")
    weights = parameters * BYTES[run.model.dtype]
    # Gradients in the weights' dtype, Adam's two moments likewise.
    memory = weights * (4 + reference)
    return [
        f"prompts per generation: {plan.prompts_per_generation}; updates per generation: {plan.updates};"
        f" rows per forward: {plan.per_device_train_batch_size}",
        f"passes per generation and rank: {', '.join(passes)}",
        f"{parameters:,} parameters; weights, gradients, optimizer{' and reference' if reference else ''}:"
        f" {memory / 2**20:,.0f} MiB per rank, activations not counted",
    ]
