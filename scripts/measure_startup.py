"""Compare how long composer-train and `trl grpo` take to answer --help and the like; prints the ratios.

python scripts/measure_startup.py [--repeats 5]

The commands alternate within one run of this script, so that both meet the same load; a ratio is one of medians.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

BIN = Path(sys.executable).parent
BASELINE = ([str(BIN / "trl"), "grpo", "--help"], {})
COMMANDS = {
    "--cfg job": ([str(BIN / "composer-train"), "--cfg", "job"], {}),
    "--help": ([str(BIN / "composer-train"), "--help"], {}),
    "TAB": (
        [str(BIN / "composer-train"), "-sc", "query=bash"],
        {"COMP_LINE": "composer-train objective=", "COMP_POINT": "25"},
    ),
}


def seconds(command: list[str], environment: dict[str, str]) -> float:
    """Wall seconds of one command."""
    start = time.perf_counter()
    subprocess.run(command, env=os.environ | environment, check=True, capture_output=True)
    return time.perf_counter() - start


def main() -> None:
    """Time all commands in turn and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    times: dict[str, list[float]] = {name: [] for name in ("trl grpo --help", *COMMANDS)}
    for _ in range(repeats):
        times["trl grpo --help"].append(seconds(*BASELINE))
        for name, command in COMMANDS.items():
            times[name].append(seconds(*command))
    baseline = statistics.median(times["trl grpo --help"])
    print(f"trl grpo --help: {baseline:.2f} s (median of {repeats})")
    for name in COMMANDS:
        median = statistics.median(times[name])
        print(f"composer-train {name}: {median:.2f} s, {median / baseline:.3f} of trl grpo --help")


if __name__ == "__main__":
    main()
