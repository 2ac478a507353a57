"""Which versions a run is made with, and the check that TRL is the one whose private methods we override."""

import json
import platform
import subprocess
from importlib import metadata
from pathlib import Path

from composer_rl.config import PACKAGE_DIR, ConfigError

TESTED_TRL = "1.16"
RECORDED = "accelerate composer-rl datasets deepspeed hydra-core numpy omegaconf peft torch transformers trl vllm wandb"


def check_trl() -> None:
    """Raise ConfigError unless the installed TRL is of the minor version this package overrides."""
    try:
        installed = metadata.version("trl")
    except metadata.PackageNotFoundError:
        installed = "none"
    if installed.split(".")[:2] != TESTED_TRL.split("."):
        raise ConfigError(
            f"trl {installed} is installed, but composer-rl overrides private methods of trl {TESTED_TRL}.x;"
            f" pip install 'trl~={TESTED_TRL}.0'"
        )


def collect_versions() -> dict[str, str | None]:
    """Return Python, platform, package versions (None = not installed) and the git commit of this source tree."""
    versions: dict[str, str | None] = {"python": platform.python_version(), "platform": platform.platform()}
    for name in RECORDED.split():
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    versions["git_commit"] = _git_commit(PACKAGE_DIR)
    return versions


def write_versions(run_dir: Path) -> None:
    """Write versions.json into a run folder."""
    (run_dir / "versions.json").write_text(json.dumps(collect_versions(), indent=2) + "\n")


def _git_commit(folder: Path) -> str | None:
    """Return the commit of the checkout that holds `folder`, with +dirty when it has changes; None outside one."""

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)

    try:
        tracked = git("ls-files", "--error-unmatch", str(folder / "config.py")).returncode == 0
        if not tracked:
            return None
        commit = git("rev-parse", "HEAD").stdout.strip()
        return commit + ("+dirty" if git("status", "--porcelain", str(folder)).stdout.strip() else "")
    except FileNotFoundError:
        return None
