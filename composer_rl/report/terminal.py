"""The banner before a run and the table after it."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from composer_rl.config import BatchPlan, Device, KLPlacement, RunConfig
from composer_rl.hardware import resolve_precision

REPRODUCES = {
    "full": "the whole published method",
    "loss_only": "the published loss; its header lists what is not here",
    "partial": "part of the published method; its header lists what differs",
}


def print_banner(
    console: Console, run: RunConfig, plan: BatchPlan, steps: int, heldout_prompts: int, *, gpu: bool
) -> None:
    """Print what is about to run: ranks, precision, batch arithmetic and what the preset reproduces."""
    kl = run.kl
    table = _pairs(f"composer-rl: {run.run_name}")
    table.add_row("objective", f"{run.objective.name} ({REPRODUCES[run.objective.reproduces.value]})")
    where = f"{kl.estimator.value} in the {kl.placement.value}, coefficient {kl.coef:g}"
    table.add_row("KL to reference", "none" if kl.placement == KLPlacement.none else where)
    table.add_row("policy", f"{run.model.path} ({run.model.dtype.value} weights)")
    table.add_row("task", f"{run.task.name}, gold {run.task.gold}, {heldout_prompts} held-out prompts")
    precision = resolve_precision(run.hardware, gpu=gpu)
    channels = run.channels
    table.add_row("channels", f"alpha_sdpo {channels.alpha_sdpo:g}, beta_replay {channels.beta_replay:g}")
    device = "GPU" if gpu and run.hardware.device != Device.cpu else "CPU"
    table.add_row("machine", f"{plan.world_size} rank(s), {device}, {precision.value}")
    table.add_row("batch", describe_batch(plan))
    table.add_row("budget", f"{steps} optimizer steps, learning rate {run.trainer.learning_rate:g}")
    console.print(table)


def describe_batch(plan: BatchPlan) -> str:
    """Return the batch arithmetic as one sentence."""
    return (
        f"{plan.prompts_per_generation} prompts x {plan.num_generations} = {plan.generation_batch_size} rollouts"
        f" per generation, {plan.updates} update(s) of {plan.rollouts_per_update} rollouts ="
        f" {plan.world_size} rank(s) x {plan.per_device_train_batch_size} rows"
        f" x {plan.gradient_accumulation_steps} accumulation"
    )


def print_pairs(console: Console, usable: int, dropped: dict[str, int]) -> None:
    """Print how many preference pairs are replayed, and why others are not."""
    reasons = ", ".join(f"{reason} {count}" for reason, count in dropped.items())
    console.print(f"replay: {usable} pairs" + (f", left out: {reasons}" if reasons else ""), highlight=False)


def print_closing(console: Console, summary: dict[str, Any], run_dir: Path) -> None:
    """Print what came out of a run, from its summary."""
    table = _pairs("done")
    table.add_row(
        "held-out score",
        f"{summary['heldout_before']:.3f} -> {summary['heldout_after']:.3f}"
        f" (standard error {summary['heldout_standard_error']:.3f}, n = {summary['heldout_n']})",
    )
    table.add_row(
        "rollouts with a tool error", f"{summary['tool_error_before']:.3f} -> {summary['tool_error_after']:.3f}"
    )
    split = ", ".join(f"{name} {seconds:.0f}" for name, seconds in summary["seconds_split"].items())
    table.add_row("time", f"{summary['seconds']:.0f} s ({split})")
    table.add_row("steps, tokens", f"{summary['steps']}, {summary['tokens']}")
    table.add_row("run folder", str(run_dir))
    console.print(table)


def _pairs(title: str) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    return table
