"""The learning curve of one run as a PNG, from its metrics.jsonl."""

import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics.jsonl in file order."""
    with open(path) as file:
        return [json.loads(line) for line in file]


def series(rows: list[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Return (steps, values) of one metric, rows without it left out."""
    points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
    return [step for step, _ in points], [value for _, value in points]


def draw_curve(metrics: Path, picture: Path, title: str) -> None:
    """Draw reward, held-out score with its standard error, and tool-error shares against optimizer steps."""
    rows = read_metrics(metrics)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="optimizer step", title=title)
    axes.plot(*series(rows, "reward"), color="tab:blue", alpha=0.4, label="train reward")
    axes.plot(*series(rows, "tools/error_share"), color="tab:red", alpha=0.4, label="train rollouts with a tool error")
    steps, scores = series(rows, "heldout/score")
    axes.errorbar(
        steps,
        scores,
        yerr=series(rows, "heldout/standard_error")[1],
        color="tab:blue",
        marker="o",
        capsize=3,
        label="held-out score",
    )
    axes.plot(
        *series(rows, "heldout/tool_error_share"), color="tab:red", marker="o", label="held-out with a tool error"
    )
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(picture)
