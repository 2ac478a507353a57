"""Every command of the README runs, shortened where it would take minutes; each shortening is written here."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import composer_train
from test_train import TINY

REPOSITORY = Path(__file__).parent.parent
README = (REPOSITORY / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
LINES = [line for language, text in BLOCKS if language == "" for line in text.splitlines()]
TRAINING = sorted({line for line in LINES if line.startswith("composer-train")})


def environment() -> dict[str, str]:
    """The PATH that the README asks for."""
    return os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


@pytest.fixture
def users_folder(tmp_path):
    """A folder with what the README's commands read: a preset of the user's own and a trained model."""
    (tmp_path / "mine" / "objective").mkdir(parents=True)
    preset = (REPOSITORY / "conf/objective/dapo.yaml").read_text()
    (tmp_path / "mine" / "objective" / "wide.yaml").write_text(
        preset.replace("epsilon_high: 0.28", "epsilon_high: 0.5")
    )
    # A copy: a run of the same name saves its model there.
    shutil.copytree(REPOSITORY / "composer_rl" / "assets" / "tiny", tmp_path / "runs" / "dr_grpo-shop-s1" / "model")
    return tmp_path


@pytest.mark.parametrize("line", TRAINING)
def test_a_command_line_works(line, users_folder):
    command = line.split()[1:]
    if not {"--cfg", "dry_run=true"} & set(command):
        # Shortened: one or two steps of 16 rollouts and 8 held-out prompts instead of minutes.
        command = [word for word in command if word != "experiment=smoke"] + TINY
        if "-m" in command or "objective=dapo" in command:
            command += ["trainer.max_steps=1"]
    done = composer_train(*command, cwd=users_folder)
    assert done.returncode == 0, done.stderr


def test_completion_offers_options():
    (line,) = re.findall(r"`(eval .*?)`", README)
    script = f'{line}; COMP_LINE="composer-train objective=" COMP_POINT=25 composer-train -sc query=bash'
    done = subprocess.run(["bash", "-c", script], env=environment(), capture_output=True, text=True, check=True)
    assert "objective=dapo" in done.stdout


def test_the_make_targets_do_what_the_readme_says():
    # Shortened: make says what it would run; CI itself runs `make check test` on a fresh clone.
    # Not a part of the make that runs this test.
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    for target, command in (("run", ".venv/bin/composer-train"), ("test", ".venv/bin/pytest -n auto --dist loadfile")):
        assert f"make {target}" in LINES
        said = subprocess.run(
            ["make", "-n", target], cwd=REPOSITORY, env=outside, capture_output=True, text=True, check=True
        )
        assert said.stdout.splitlines()[-1] == command
    shown = subprocess.run(["make"], cwd=REPOSITORY, env=outside, capture_output=True, text=True, check=True).stdout
    targets = re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    for target in targets:
        assert re.search(rf"make {target}\s+\S", shown), f"make help says nothing of {target}"


def test_the_pip_command_resolves():
    (command,) = re.findall(r"`pip (install -e \. -c constraints\.txt)`", README)
    # Shortened: nothing is downloaded or installed.
    pip = [sys.executable, "-m", "pip", *command.split(), "--no-deps", "--no-build-isolation", "--dry-run"]
    done = subprocess.run(pip, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_measuring_command_runs(tmp_path):
    assert "`python scripts/prove_default.py`" in README
    # Shortened: one seed and two steps, which keep no promise, so it exits 1 after printing its table.
    script = [sys.executable, str(REPOSITORY / "scripts" / "prove_default.py"), "--seeds", "1", "--output", "out"]
    done = subprocess.run([*script, *TINY], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "| composer-train | 1 |" in done.stdout and "| plain GRPOTrainer | 1 |" in done.stdout
    assert (tmp_path / "out" / "default_run.png").is_file()


def test_the_python_example_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = [text for language, text in BLOCKS if language == "python"]
    names: dict = {}
    exec(code, names)
    assert names["args"].importance_sampling_level == "sequence"
    assert names["args"].steps_per_generation == 8


def test_the_tree_names_what_is_there():
    (tree,) = [text for language, text in BLOCKS if text.startswith("conf/")]
    named = set(re.findall(r"^ {2}(\w+\.py|\w+/)", tree, re.MULTILINE))
    package = REPOSITORY / "composer_rl"
    present = {path.name for path in package.glob("*.py") if path.name != "__init__.py"}
    present |= {f"{path.parent.name}/" for path in package.glob("*/__init__.py")} | {"assets/"}
    assert named == present
