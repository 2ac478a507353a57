"""Whole runs through the real command line on the embedded policy: artefacts, folders, sweeps, signals, failures."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import composer_train
from transformers import AutoModelForCausalLM, AutoTokenizer

# The smallest run that does everything: two steps of 16 rollouts, 8 held-out prompts.
TINY = [
    "experiment=smoke",
    "trainer.max_steps=2",
    "trainer.generation_batch_size=16",
    "trainer.num_generations=4",
    "task.heldout.count=8",
    "task.train.count=64",
]
# Metrics that measure time, which no two runs share.
CLOCKS = ("step_time", "heldout/seconds")


def numbers(run_dir: Path) -> list[dict]:
    """The rows of metrics.jsonl without the clocks."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in CLOCKS} for row in rows]


def start(*arguments: str, cwd: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "composer_rl.train", *arguments],
        cwd=cwd,
        env=os.environ.copy(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(path: Path, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.1)


def workers_of(run_dir: Path) -> list[int]:
    """Process ids of the workers that run on a folder."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                command = (process / "cmdline").read_bytes().decode().split("\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if str(run_dir / "run.yaml") in command:
                found.append(int(process.name))
    return found


def wait_for_no_workers(run_dir: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while workers_of(run_dir):
        assert time.monotonic() < deadline, f"workers {workers_of(run_dir)} are left"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of seed 3, started from its own folder."""
    cwd = tmp_path_factory.mktemp("finished")
    done = composer_train(*TINY, "seed=3", cwd=cwd)
    assert done.returncode == 0, done.stderr
    return cwd / "runs" / "dr_grpo-shop-s3", done


def test_a_run_leaves_its_artefacts(finished):
    run_dir, _ = finished
    assert {path.name for path in run_dir.iterdir()} == {
        "run.yaml", "versions.json", "metrics.jsonl", "completions", "summary.json", "curve.png", "model", "exit.json"
    }  # fmt: skip
    assert json.loads((run_dir / "exit.json").read_text())["code"] == 0
    assert (run_dir / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert (run_dir / "run.yaml").read_text().startswith("# composer-train objective=dr_grpo kl=published")


def test_metrics_are_json_objects_with_a_step_and_never_nan(finished):
    run_dir, _ = finished
    rows = [
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} in metrics.jsonl"))
        for line in (run_dir / "metrics.jsonl").read_text().splitlines()
    ]
    assert [row["step"] for row in rows] == [0, 1, 2, 2]
    logged = [row for row in rows if "loss" in row]
    assert len(logged) == 2
    for row in logged:
        assert {"reward", "grad_norm", "tools/error_share", "rewards/exact_total/mean"} <= row.keys()
    assert [row["heldout/n"] for row in rows if "heldout/score" in row] == [8, 8]


def test_the_summary_agrees_with_the_metrics_and_its_times_add_up(finished):
    run_dir, _ = finished
    summary = json.loads((run_dir / "summary.json").read_text())
    scores = [row["heldout/score"] for row in numbers(run_dir) if "heldout/score" in row]
    assert (summary["heldout_before"], summary["heldout_after"]) == (scores[0], scores[-1])
    assert summary["steps"] == 2
    assert summary["tokens"] == [row["num_tokens"] for row in numbers(run_dir) if "num_tokens" in row][-1]
    assert sum(summary["seconds_split"].values()) == pytest.approx(summary["seconds"])
    assert all(seconds > 0 for seconds in summary["seconds_split"].values())


def test_completions_are_kept_with_their_turns(finished):
    run_dir, _ = finished
    files = sorted((run_dir / "completions").iterdir())
    assert [file.name for file in files] == ["step-000001.jsonl", "step-000002.jsonl"]
    rows = [json.loads(line) for line in files[0].read_text().splitlines()]
    assert len(rows) == 16
    assert {message["role"] for row in rows for message in row["completion"]} == {"assistant", "tool"}
    assert all(set(row["rewards"]) == {"exact_total", "thorough_reply"} for row in rows)


def test_the_trained_model_loads_in_transformers(finished):
    run_dir, _ = finished
    model = AutoModelForCausalLM.from_pretrained(run_dir / "model")
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "model")
    ids = tokenizer("Total:", return_tensors="pt").input_ids
    assert model(ids).logits.shape[-1] == model.config.vocab_size


def test_the_terminal_shows_the_plan_and_the_outcome_and_no_library_warning(finished):
    _, done = finished
    assert (
        done.stderr
        == "warning: 16 rollouts per update is fewer than 4 groups of 4; gradients will be noisy:"
        + (" raise trainer.generation_batch_size or lower objective.updates_per_generation\n")
        or done.stderr == ""
    )
    for text in ("dr_grpo (the whole published method)", "1 rank(s)", "4 prompts x 4 = 16 rollouts", "held-out score"):
        assert text in " ".join(done.stdout.split()), text
    assert "Warning" not in done.stdout


def test_the_embedded_default_learns_within_a_third_of_its_steps(tmp_path):
    done = composer_train(
        "trainer.max_steps=20", "trainer.eval_steps=0", "hydra.run.dir=run", cwd=tmp_path, timeout=600
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert 0.2 <= summary["heldout_before"] <= 0.5
    assert 0.3 <= summary["tool_error_before"] <= 0.6
    assert summary["heldout_after"] - summary["heldout_before"] >= 0.25
    assert summary["tool_error_after"] <= 0.5 * summary["tool_error_before"]


def test_job_2_of_a_sweep_equals_the_same_job_run_alone_number_for_number(finished, tmp_path):
    alone, _ = finished
    done = composer_train("-m", *TINY, "seed=2,3", "hydra.sweep.dir=sweep", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert numbers(tmp_path / "sweep" / "1") == numbers(alone)
    assert numbers(tmp_path / "sweep" / "0") != numbers(alone)


def test_a_failing_job_does_not_sink_a_sweep_and_the_exit_code_tells(tmp_path):
    done = composer_train("-m", *TINY, "task.gold=exact_total,speed", "hydra.sweep.dir=sweep", cwd=tmp_path)
    assert done.returncode == 2
    assert "job 1 (" in done.stderr and "task.gold=speed: must be one of" in done.stderr
    assert json.loads((tmp_path / "sweep" / "0" / "exit.json").read_text())["code"] == 0


def test_the_default_folder_takes_the_next_free_suffix_and_a_chosen_one_is_refused(finished):
    run_dir, _ = finished
    cwd = run_dir.parent.parent
    before = numbers(run_dir)
    refused = composer_train(*TINY, "seed=3", f"hydra.run.dir={run_dir}", cwd=cwd)
    assert refused.returncode == 2
    assert "holds a run already; name another folder" in refused.stderr
    again = composer_train(*TINY, "seed=3", cwd=cwd)
    assert again.returncode == 0, again.stderr
    second = run_dir.with_name("dr_grpo-shop-s3-2")
    assert numbers(second) == before == numbers(run_dir)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_the_workers_and_comes_back_as_the_exit_code(signum, tmp_path):
    run_dir = tmp_path / "run"
    process = start(*TINY, "trainer.max_steps=500", "trainer.num_train_epochs=500", "hydra.run.dir=run", cwd=tmp_path)
    wait_for(run_dir / "completions")
    process.send_signal(signum)
    _, stderr = process.communicate(timeout=40)
    assert process.returncode == 128 + signum
    assert f"stopped by {signum.name}" in stderr
    assert "Traceback" not in stderr
    assert json.loads((run_dir / "exit.json").read_text())["code"] == 128 + signum
    assert not workers_of(run_dir)


def test_no_worker_outlives_a_killed_launcher(tmp_path):
    run_dir = tmp_path / "run"
    process = start(*TINY, "trainer.max_steps=500", "hydra.run.dir=run", cwd=tmp_path)
    wait_for(run_dir / "completions")
    assert workers_of(run_dir)
    process.kill()
    process.wait()
    wait_for_no_workers(run_dir, seconds=35)


def test_an_exception_ends_the_run_with_its_traceback_once_and_code_1(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def broken(completions, **kwargs):\n    raise RuntimeError('the judge is down')\n"
    )
    done = composer_train(
        *TINY, "task.rewards.thorough_reply.function=mine.broken", "hydra.run.dir=run", cwd=tmp_path,
        PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}",
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.count("RuntimeError: the judge is down") == 1
    recorded = json.loads((tmp_path / "run" / "exit.json").read_text())
    assert recorded["code"] == 1 and "the judge is down" in recorded["message"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_gradient_that_is_not_finite_ends_the_run_before_the_step(ranks, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def infinite(completions, **kwargs):\n    return [float('inf'), *([0.0] * (len(completions) - 1))]\n"
    )
    done = composer_train(
        *TINY, "task.rewards.thorough_reply.function=mine.infinite", "task.rewards.thorough_reply.weight=1",
        "hardware=cpu", f"hardware.num_processes={ranks}", "hydra.run.dir=run", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.count("FloatingPointError: gradient norm") == 1
    assert "at step 1: the step was not taken" in done.stderr
    assert not (tmp_path / "run" / "model").exists()


WORKER_MISTAKES = {
    "unknown GRPOConfig field": (["+trainer.extra.logging_dir=x"], "GRPOConfig has no such field"),
    "unknown scheduler": (["trainer.lr_scheduler_type=cosinus"], "GRPOConfig: cosinus is not a valid SchedulerType"),
    "reward that cannot be imported": (
        ["task.rewards.exact_total.function=no.such.thing"],
        "task.rewards.exact_total.function=no.such.thing: cannot be imported",
    ),
    "rows argument that does not fit": (["+task.train.cuont=3"], "task.train: composer_rl.task.shop.make_rows"),
    "too few rows": (["task.train.count=3"], "task.train: 3 rows, but one generation of 16 rollouts takes 4 prompts"),
    "overlap": (["task.heldout.split=train"], "prompt(s) are also in task.train"),
    "folder without a model": (["model=hf", "model.path=."], "model.path="),
}


@pytest.mark.parametrize("case", WORKER_MISTAKES)
def test_what_only_the_worker_can_see_is_still_one_line_before_weights_load(case, tmp_path):
    arguments, expected = WORKER_MISTAKES[case]
    done = composer_train(*TINY, *arguments, "hydra.run.dir=run", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("composer-train: ")]
    assert expected in lines[0]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_signal_reaches_the_loss_from_the_config(ranks, tmp_path):
    machine = ["hardware=cpu", f"hardware.num_processes={ranks}"]
    signals = ["channels=sdpo_replay", "kl=reward", "objective.updates_per_generation=2"]
    done = composer_train(*TINY, *machine, *signals, "trainer.max_steps=4", "hydra.run.dir=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "replay: 471 pairs" in done.stdout
    logged = [row for row in numbers(tmp_path / "run") if "loss" in row]
    assert len(logged) == 4
    for row in logged:
        terms = row["loss/grpo"] + 0.1 * row["loss/sdpo_kl"] + 0.1 * row["loss/trace_replay_dpo"]
        assert row["loss/total"] == pytest.approx(terms, abs=1e-6)
        assert row["loss/total"] == pytest.approx(row["loss"], abs=1e-5)
        assert row["replay/pairs"] == 8
        assert row["sdpo/error_turns/raised"] >= row["sdpo/excluded/no_hint"]
    assert sum(row["sdpo/distilled_tokens"] for row in logged) > 0
    # The policy is its own reference until its first update.
    assert abs(logged[0]["kl_reward/k1_seq"]) < 1e-5 < abs(logged[2]["kl_reward/k1_seq"])


@pytest.mark.parametrize("source", ["peer", "column"])
def test_other_hint_sources_are_reached_from_the_config(source, tmp_path):
    done = composer_train(
        *TINY, "channels=sdpo", f"channels.sdpo_hints={source}", "channels.sdpo_teacher=live",
        "hydra.run.dir=run", cwd=tmp_path,
    )  # fmt: skip
    if source == "column":
        assert done.returncode == 2
        assert "channels.sdpo_hints=column: the train rows have no column hint" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        logged = [row for row in numbers(tmp_path / "run") if "loss" in row]
        assert sum(row["sdpo/eligible_rows"] for row in logged) > 0


def test_two_ranks_train_one_run(tmp_path):
    done = composer_train(*TINY, "hardware=cpu", "hardware.num_processes=2", "hydra.run.dir=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2 rank(s)" in done.stdout
    rows = numbers(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 1, 2, 2]
    assert len((tmp_path / "run" / "completions" / "step-000001.jsonl").read_text().splitlines()) == 16


def test_the_held_out_score_before_training_is_the_same_on_one_rank_and_on_two(finished, tmp_path):
    one, _ = finished
    done = composer_train(
        *TINY, "seed=3", "hardware=cpu", "hardware.num_processes=2", "hydra.run.dir=run", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert numbers(tmp_path / "run")[0] == numbers(one)[0]


def test_a_relative_model_path_resolves_against_the_launch_directory(finished, tmp_path):
    trained, _ = finished
    (tmp_path / "weights").symlink_to(trained / "model")
    done = composer_train(
        *TINY, "model=hf", "model.path=weights", "hydra.run.dir=run", "hydra.job.chdir=true", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert str((trained / "model").resolve()) in (tmp_path / "run" / "run.yaml").read_text()


def test_a_secret_from_the_environment_is_not_written(tmp_path):
    done = composer_train(*TINY, "run_name=${oc.env:WHO}", "hydra.run.dir=run", cwd=tmp_path, WHO="very-secret")
    assert done.returncode == 0, done.stderr
    assert "${oc.env:WHO}" in (tmp_path / "run" / "run.yaml").read_text()
    assert "very-secret" in done.stdout, "the worker resolves it"


def test_a_dry_run_prints_the_plan_and_writes_nothing(tmp_path):
    done = composer_train("dry_run=true", "objective=gspo", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    for part in ("<|im_start|>user", "exact_total: 0.0", "updates per generation: 4", "MiB per rank", "nothing was"):
        assert part in text, part
    assert list(tmp_path.iterdir()) == []


def test_training_is_the_same_with_and_without_held_out_evaluation_on_the_way(tmp_path):
    rows = {}
    for every in (0, 1):
        done = composer_train(
            *TINY, "trainer.max_steps=3", f"trainer.eval_steps={every}", f"hydra.run.dir=run{every}", cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        rows[every] = [row for row in numbers(tmp_path / f"run{every}") if "loss" in row]
    assert len(rows[0]) == 3
    assert rows[0] == rows[1]
