"""What several test files share: composing a config in this process, and running the real command line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from composer_rl.config import RunConfig, config_dir, load_run, register_schema

# Test files run side by side, and some start two ranks: more threads would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def compose_run(*overrides: str) -> RunConfig:
    """Return the typed config that `composer-train OVERRIDES` would run."""
    register_schema()
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return load_run(compose("config", overrides=list(overrides)))


def composer_train(*arguments: str, cwd: Path, timeout: float = 300, **environment: str):
    """Run the real command line in `cwd` and return its CompletedProcess (text)."""
    return subprocess.run(
        [sys.executable, "-m", "composer_rl.train", *arguments],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    """Tests start their own ranks, whatever launcher they run under."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
