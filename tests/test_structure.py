"""Imports run one way, the light modules stay light, and the pinned TRL is checked by name."""

import ast
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import composer_rl
from composer_rl.config import ConfigError
from composer_rl.versions import check_trl

PACKAGE = Path(composer_rl.__file__).parent

# A module may import what stands on the lines above its own; names are packages or modules of composer_rl.
LAYERS = (
    {"config"},
    {"versions", "launch", "objective", "hardware", "rollout", "losses"},
    {"train", "channels", "task", "model", "heldout"},
    {"collator", "arguments"},
    {"trainer"},
    {"callbacks", "report"},
    {"dry_run"},
    {"worker"},
)
# The command line itself reaches nothing heavy, whatever its layer allows.
TRAIN_MAY_IMPORT = {"config", "launch", "versions"}
LIGHT = ("config", "train", "launch", "versions", "rollout", "objective", "task.load", "task.rows", "task.shop")


def imports_of(path: Path) -> set[str]:
    """The modules of composer_rl that a file imports, anywhere in it, by their first name."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("composer_rl."):
            names.add(node.module.split(".")[1])
        elif isinstance(node, ast.ImportFrom) and node.module == "composer_rl":
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            names.update(a.name.split(".")[1] for a in node.names if a.name.startswith("composer_rl."))
    return names


def files_of(name: str) -> list[Path]:
    folder = PACKAGE / name
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [PACKAGE / f"{name}.py"]


def test_every_module_has_a_layer():
    modules = {path.stem if path.is_file() else path.name for path in PACKAGE.iterdir()}
    modules -= {"__init__", "__pycache__", "assets", "conf"}
    assert modules == set().union(*LAYERS)


@pytest.mark.parametrize("level", range(len(LAYERS)))
def test_imports_run_one_way(level):
    below = set().union(*LAYERS[:level])
    for name in LAYERS[level]:
        for path in files_of(name):
            extra = imports_of(path) - below - {name}
            assert not extra, f"{path.name} imports {extra}, which its layer may not"


def test_the_command_line_imports_only_what_is_light():
    assert imports_of(PACKAGE / "train.py") <= TRAIN_MAY_IMPORT


def test_only_the_command_line_and_the_config_know_hydra():
    for path in PACKAGE.rglob("*.py"):
        if path.name not in ("train.py", "config.py"):
            assert "import hydra" not in path.read_text() and "from hydra" not in path.read_text(), path


def test_light_modules_import_without_torch():
    code = "; ".join(f"import composer_rl.{name}" for name in LIGHT)
    code += "; import sys; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_another_trl_is_refused_with_both_versions(monkeypatch):
    check_trl()
    monkeypatch.setattr(metadata, "version", lambda name: "1.17.2")
    with pytest.raises(ConfigError, match=r"trl 1\.17\.2 is installed, but .* trl 1\.16\.x"):
        check_trl()
