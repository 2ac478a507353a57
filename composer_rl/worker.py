"""One rank of a run, told as a story: from the frozen run.yaml to the summary and the trained model."""

import atexit
import json
import os
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any, NoReturn

from omegaconf import DictConfig, OmegaConf

from composer_rl.config import ConfigError, RunConfig, load_run, plan_batch, register_schema
from composer_rl.launch import Stopped, end_with_launcher, raise_on_signals, record_exit
from composer_rl.versions import write_versions


def main() -> None:
    """Run one rank on the run.yaml named on the command line and exit with the code of the run."""
    end_with_launcher()
    raise_on_signals()
    run_file = Path(sys.argv[1])
    run_dir = run_file.parent
    try:
        run = read_run(run_file)
        quiet_libraries()
        if run.dry_run:
            from composer_rl.dry_run import dry_run

            dry_run(run)
        else:
            train(run, run_dir)
        _leave(0)
    except ConfigError as error:
        _exit(run_dir, 2, f"composer-train: {error}")
    except Stopped as stopped:
        _exit(run_dir, stopped.code, f"composer-train: {stopped}")
    except Exception:
        _exit(run_dir, 1, traceback.format_exc())


def read_run(run_file: Path) -> RunConfig:
    """Load a frozen run.yaml; environment references are resolved here."""
    register_schema()
    frozen = OmegaConf.load(run_file)
    assert isinstance(frozen, DictConfig)
    return load_run(frozen)


def train(run: RunConfig, run_dir: Path) -> None:
    """Train one policy as the config says and leave the artefacts of the run in `run_dir`."""
    # Heavy from here on; what could be refused without torch has been refused.
    import torch
    from datasets import Dataset
    from rich.console import Console
    from transformers import PrinterCallback

    from composer_rl.arguments import planned_steps, require_rows, signal_arguments, training_arguments
    from composer_rl.callbacks import (
        CompletionsCallback,
        HeldoutCallback,
        MetricsCallback,
        MetricsFile,
        ProgressCallback,
    )
    from composer_rl.heldout import HeldoutEvaluation
    from composer_rl.model import load_policy, load_tokenizer
    from composer_rl.report.curve import draw_curve
    from composer_rl.report.terminal import print_banner, print_closing, print_pairs
    from composer_rl.task.load import load_task
    from composer_rl.trainer import ComposerTrainer

    console = Console()
    main_rank = int(os.environ.get("RANK", "0")) == 0
    plan = plan_batch(run)

    # 1. Everything that can be refused before weights load.
    task = load_task(run.task)
    require_rows(len(task.train_rows), plan)
    tokenizer = load_tokenizer(run.model, tools=task.environment is not None)
    args = training_arguments(run, plan, run_dir, task.reward_weights)

    # 2. The policy and its trainer. GRPOConfig exists before weights load: ZeRO-3 needs that order.
    policy = load_policy(run.model)
    trainer = ComposerTrainer(
        model=policy,
        args=args,
        reward_funcs=task.rewards,
        train_dataset=Dataset.from_list(task.train_rows),
        processing_class=tokenizer,
        environment_factory=task.environment,
        **signal_arguments(run, task, tokenizer),
    )
    if trainer.replay is not None:
        trainer.replay.prepare(trainer, run_dir / "replay_reference.safetensors")

    # 3. What happens beside the loop.
    metrics = MetricsFile(run_dir / "metrics.jsonl")
    heldout = HeldoutCallback(
        trainer,
        HeldoutEvaluation(
            task.heldout_rows,
            task.gold,
            run.task.error_pattern,
            seed=run.seed,
            batch_size=run.trainer.max_micro_batch_size,
        ),
        metrics,
        every=run.trainer.eval_steps,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(MetricsCallback(metrics))
    trainer.add_callback(heldout)
    if run.tracking.log_completions:
        trainer.add_callback(CompletionsCallback(trainer, run_dir / "completions"))
    if main_rank:
        trainer.add_callback(ProgressCallback(heldout, console))
        write_versions(run_dir)
        steps = args.max_steps if args.max_steps > 0 else planned_steps(len(task.train_rows), plan, run)
        print_banner(console, run, plan, steps, len(task.heldout_rows), gpu=torch.cuda.is_available())
        if trainer.replay is not None:
            print_pairs(console, len(trainer.replay.pairs), trainer.replay.dropped)

    # 4. Train, then keep what came out.
    start = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - start
    trainer.save_model(str(run_dir / "model"))
    if main_rank:
        summary = summarise(trainer, heldout, seconds)
        (run_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        draw_curve(metrics.path, run_dir / "curve.png", run.run_name)
        print_closing(console, summary, run_dir)


def summarise(trainer: Any, heldout: Any, seconds: float) -> dict[str, Any]:
    """Return the content of summary.json: held-out before and after, steps, tokens and where the time went."""
    steps = sorted(heldout.scores)
    before, after = heldout.scores[steps[0]], heldout.scores[steps[-1]]
    split = {**trainer.seconds, "heldout": heldout.seconds}
    split["train"] = seconds - sum(split.values())
    return {
        "heldout_before": before.mean,
        "heldout_after": after.mean,
        "heldout_standard_error": after.standard_error,
        "heldout_n": after.n,
        "tool_error_before": before.tool_error_share,
        "tool_error_after": after.tool_error_share,
        "steps": trainer.state.global_step,
        "tokens": trainer.state.num_input_tokens_seen,
        "seconds": seconds,
        "seconds_split": split,
    }


def quiet_libraries() -> None:
    """Silence what the user cannot act on; errors of the libraries still propagate as exceptions."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    # The tokenizer's threads are idle when the rewards fork; without this it warns at every fork.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # TRL and transformers call their own old names.
    for name in ("gradient_checkpointing", "is_gradient_checkpointing"):
        warnings.filterwarnings("ignore", message=f"`{name}` is deprecated", category=FutureWarning)
    import datasets
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()


def _exit(run_dir: Path, code: int, message: str) -> NoReturn:
    """Exit with `code`; the first rank to fail says why, once, on the terminal and in exit.json."""
    if record_exit(run_dir, code, message):
        print(message, file=sys.stderr)
    _leave(code)


def _leave(code: int) -> NoReturn:
    """End this process with `code`, after what libraries registered for its end (trackers finish there).

    The interpreter's own teardown is left out: with several ranks it sometimes destroys a process group whose
    threads still run, which aborts the process and turns any code into 134.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
