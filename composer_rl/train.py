"""composer-train: compose one config, check it, freeze it into the run folder, and run the worker ranks on it."""

import importlib.util
import json
import math
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from composer_rl.config import (
    GROUPS,
    ConfigError,
    RunConfig,
    config_dir,
    explain,
    load_run,
    plan_batch,
    register_schema,
    require,
)
from composer_rl.launch import record_exit, run_workers
from composer_rl.versions import check_trl


def main() -> None:
    """Run the command line; exit codes: 0 done, 2 configuration, 1 anything else, 128 + n stopped by signal n."""
    # Hydra otherwise prints its own multi-line report and exits 1 for every mistake.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    register_schema()
    job = Job()
    run = hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="config")(job)
    try:
        run()
    except (HydraException, OmegaConfBaseException) as error:
        job.failures.append(Failure(2, _one_line(error)))
    for failure in job.failures:
        print(f"composer-train: {failure.message}", file=sys.stderr)
    codes = {failure.code for failure in job.failures}
    sys.exit(codes.pop() if len(codes) == 1 else bool(codes))


@dataclass(frozen=True)
class Failure:
    """How a job failed: its exit code and one line."""

    code: int
    message: str


class Job:
    """What Hydra calls for each job of a command: one run, or many in a multirun."""

    # Hydra names the job after the task function.
    __name__ = "composer-train"

    def __init__(self) -> None:
        self.failures: list[Failure] = []

    def __call__(self, config: DictConfig) -> float | None:
        """Run one job and return its held-out score; a failed job is noted and scores NaN.

        An exception would make Hydra print its own report, and in a multirun hide all but the first failure.
        """
        context = HydraConfig.get()
        try:
            return run_job(config)
        except ConfigError as error:
            code, message = 2, str(error)
        except (HydraException, OmegaConfBaseException) as error:
            code, message = 2, _one_line(error)
        except WorkersFailed as error:
            code, message = error.code, str(error)
        if context.mode == RunMode.MULTIRUN:
            message = f"job {context.job.num} ({' '.join(context.overrides.task)}): {message}"
        self.failures.append(Failure(code, message))
        return math.nan


class WorkersFailed(Exception):
    """The workers of a run ended with a code other than 0."""

    def __init__(self, code: int, where: str) -> None:
        super().__init__(f"exit code {code}, {where}")
        self.code = code


def run_job(config: DictConfig) -> float | None:
    """Check one composed config, freeze it, run its workers, and return the held-out score.

    Raises ConfigError before anything heavy has started, WorkersFailed when the workers end with a code.
    """
    launch_dir = Path(HydraConfig.get().runtime.cwd)
    output_dir = launch_dir / HydraConfig.get().runtime.output_dir
    # Hydra has made the folder; it comes back once a run claims it.
    _remove_if_empty(output_dir)
    if "RANK" in os.environ:
        raise ConfigError(
            "RANK is set: composer-train starts its own ranks; run it without a launcher, with"
            f" hardware.num_processes={os.environ.get('WORLD_SIZE', 'N')}"
        )
    check_trl()
    choices = _choices()
    _resolve_inputs(config, launch_dir)
    run = load_run(config)
    _check_trackers(run)
    for note in (*plan_batch(run).warnings, *_idle_knobs(run)):
        print(f"warning: {note}", file=sys.stderr)
    text = f"# composer-train {choices}\n{freeze(config)}"

    if run.dry_run:
        with tempfile.TemporaryDirectory() as folder:
            run_file = Path(folder) / "run.yaml"
            run_file.write_text(text)
            code = run_workers(run_file, 1, launch_dir)
        if code:
            raise WorkersFailed(code, "dry run")
        return None

    run_dir = claim_run_dir(output_dir, text, by_hand=_chosen_by_hand())
    code = run_workers(run_dir / "run.yaml", run.hardware.num_processes, launch_dir)
    record_exit(run_dir, code, "done" if code == 0 else f"the workers ended with code {code}")
    if code:
        raise WorkersFailed(code, str(run_dir))
    score = json.loads((run_dir / "summary.json").read_text())["heldout_after"]
    return float(score)


def freeze(config: DictConfig) -> str:
    """Return the resolved config as YAML in which environment variables stay references (no secret is written).

    Types are dropped first, so that a reference may stand where the worker will read a number.
    """
    untyped = OmegaConf.create(OmegaConf.to_container(config, resolve=False, enum_to_str=True))

    def reference(*arguments: Any) -> str:
        return "${oc.env:" + ",".join("null" if a is None else str(a) for a in arguments) + "}"

    OmegaConf.register_new_resolver("oc.env", reference, replace=True)
    try:
        return OmegaConf.to_yaml(untyped, resolve=True)
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


def claim_run_dir(requested: Path, text: str, *, by_hand: bool) -> Path:
    """Create run.yaml exclusively in `requested`, or in the next free `requested`-2, -3, ... and return the folder.

    Raises ConfigError when the folder was chosen by hand and holds a run.
    """
    number = 1
    while True:
        run_dir = requested if number == 1 else requested.with_name(f"{requested.name}-{number}")
        run_dir.mkdir(parents=True, exist_ok=True)
        try:
            with open(run_dir / "run.yaml", "x") as file:
                file.write(text)
            return run_dir
        except FileExistsError:
            if by_hand:
                raise ConfigError(f"hydra.run.dir={requested}: holds a run already; name another folder") from None
            number += 1


def _choices() -> str:
    """Return the option chosen in each group, as a command line would name them.

    Raises ConfigError for a list of options, which Hydra merges without a word and leaves out of its choices.
    """
    choices = HydraConfig.get().runtime.choices
    for group in GROUPS:
        require(group in choices, group, "[...]", "takes one option; to run several, use -m and commas")
    named = {group: choices[group] for group in (*GROUPS, "experiment")}
    return " ".join(f"{group}={choice}" for group, choice in named.items() if choice is not None)


def _idle_knobs(run: RunConfig) -> list[str]:
    """Return a warning for each knob given on the command line that belongs to a channel whose weight is 0."""
    channels = run.channels
    idle = [
        (prefix, weight)
        for prefix, weight, value in (
            ("channels.sdpo_", "alpha_sdpo", channels.alpha_sdpo),
            ("channels.replay_", "beta_replay", channels.beta_replay),
        )
        if value == 0
    ]
    keys = [override.partition("=")[0] for override in HydraConfig.get().overrides.task]
    return [
        f"{key} has no effect with channels.{weight}=0"
        for key in keys
        for prefix, weight in idle
        if key.startswith(prefix)
    ]


def _chosen_by_hand() -> bool:
    """Whether the user named the run or sweep folder on the command line."""
    return any(
        override.lstrip("+").startswith(("hydra.run.dir=", "hydra.sweep.dir=", "hydra.sweep.subdir="))
        for override in HydraConfig.get().overrides.hydra
    )


def _resolve_inputs(config: DictConfig, launch_dir: Path) -> None:
    """Make relative input paths absolute against the launch directory; a hub name stays as it is."""
    for section, key in (("model", "path"), ("task", "replay_pairs")):
        value = None if OmegaConf.is_missing(config[section], key) else config[section][key]
        if value is not None and (launch_dir / Path(value).expanduser()).exists():
            config[section][key] = str((launch_dir / Path(value).expanduser()).resolve())


def _check_trackers(run: RunConfig) -> None:
    for tracker in run.tracking.report_to:
        if importlib.util.find_spec(tracker) is None:
            raise ConfigError(
                f"tracking.report_to={tracker}: {tracker} is not installed; pip install 'composer-rl[{tracker}]'"
            )


def _remove_if_empty(folder: Path) -> None:
    """Remove a folder, and its parent, that Hydra made and nothing was written to."""
    for path in (folder, folder.parent):
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def _one_line(error: Exception) -> str:
    """Turn an error of Hydra's composition into one line that names the key and what to do."""
    cause: Any = error.__cause__
    if isinstance(error, MissingConfigException) and error.missing_cfg_file is not None:
        group, _, name = error.missing_cfg_file.rpartition("/")
        options = sorted(error.options or [path.stem for path in (config_dir() / group).glob("*.yaml")])
        return f"unknown option {group}={name}; {group} has {', '.join(options)}"
    if isinstance(cause, OmegaConfBaseException):
        return explain(cause)
    if isinstance(error, OmegaConfBaseException):
        return explain(error)
    text = str(error)
    if isinstance(error, ConfigCompositionException) and cause is not None:
        text = f"{text}: {cause}"
    return " ".join(text.split())


if __name__ == "__main__":
    main()
