"""The wheel carries conf/ inside the package, and wheel, editable install and bare checkout find it."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(REPOSITORY)],
        check=True,
        capture_output=True,
    )
    (path,) = folder.glob("*.whl")
    return path


def tree(folder: Path) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_holds_the_package_with_conf_inside_and_nothing_else(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    package = {f"composer_rl/{name}" for name in tree(REPOSITORY / "composer_rl")}
    conf = {f"composer_rl/conf/{name}" for name in tree(REPOSITORY / "conf")}
    assert names == package | conf


def test_the_installed_wheel_works_from_any_directory_with_a_users_presets(wheel, tmp_path):
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    mine = tmp_path / "mine" / "objective"
    mine.mkdir(parents=True)
    shipped = (REPOSITORY / "conf/objective/dapo.yaml").read_text()
    (mine / "wide.yaml").write_text(shipped.replace("epsilon_high: 0.28", "epsilon_high: 0.5"))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "composer_rl.train", "--config-dir", "../mine", "objective=wide", "--cfg", "job"],
        cwd=elsewhere,
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "epsilon_high: 0.5" in done.stdout
    where = subprocess.run(
        [sys.executable, "-c", "import composer_rl.config as c; print(c.config_dir())"],
        cwd=elsewhere,
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    assert Path(where.stdout.strip()) == site / "composer_rl" / "conf"


def test_a_bare_checkout_and_an_editable_install_read_conf_beside_the_package(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", "import composer_rl.config as c; print(c.config_dir())"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert Path(done.stdout.strip()) == REPOSITORY / "conf"


def test_the_console_script_is_installed_and_lists_the_presets(tmp_path):
    script = Path(sys.executable).parent / "composer-train"
    done = subprocess.run([script, "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0
    assert "objective: bnpo, cispo, dapo, dr_grpo, grpo, gspo, sapo" in done.stdout
