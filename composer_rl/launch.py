"""Start the worker ranks of one run as subprocesses, forward signals to them, and bring their exit code back."""

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

# Seconds a worker has to end after a signal before it is killed.
GRACE_S = 30.0
# Seconds the other ranks have once one has failed: they may hang in a collective that never completes.
PEER_GRACE_S = 5.0


class Stopped(BaseException):
    """A signal asked this worker to end; a BaseException, so that no tool or reward can swallow it."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.code = 128 + signum


def run_workers(run_file: Path, num_processes: int, cwd: Path) -> int:
    """Run `num_processes` workers on a frozen run.yaml and return one exit code for them.

    The code is that of the first rank to fail (128 + n when signal n ended it), else 0. SIGINT and SIGTERM
    are forwarded; a worker that outlives its grace is killed. No worker outlives this call.
    """
    received: list[int] = []

    def forward(signum: int, frame: FrameType | None) -> None:
        received.append(signum)

    previous = {signum: signal.signal(signum, forward) for signum in (signal.SIGINT, signal.SIGTERM)}
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "composer_rl.worker", str(run_file)],
            env=os.environ | rank_environment,
            cwd=cwd,
            # Its own session: the terminal's Ctrl-C reaches the workers once, through us.
            start_new_session=True,
        )
        for rank_environment in _rank_environments(num_processes)
    ]
    failed: int | None = None
    deadline: float | None = None
    try:
        while any(worker.poll() is None for worker in workers):
            time.sleep(0.05)
            codes = [worker.returncode for worker in workers]
            if failed is None:
                failed = next((code for code in codes if code), None)
                if failed is not None:
                    _signal_all(workers, signal.SIGTERM)
                    deadline = time.monotonic() + PEER_GRACE_S
            while received:
                _signal_all(workers, received.pop(0))
                deadline = deadline or time.monotonic() + GRACE_S
            if deadline is not None and time.monotonic() > deadline:
                _signal_all(workers, signal.SIGKILL)
    finally:
        _signal_all(workers, signal.SIGKILL)
        for signum, handler in previous.items():
            signal.signal(signum, handler)
    if failed is None:
        failed = next((worker.returncode for worker in workers if worker.returncode), 0)
    return 128 - failed if failed < 0 else failed


def _rank_environments(num_processes: int) -> Iterator[dict[str, str]]:
    """Yield what each rank's environment adds: torch.distributed's variables when there are several ranks."""
    # Threads that spin while they wait make a busy machine ten times slower, and an idle one no faster.
    common = {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")}
    if num_processes == 1:
        yield common
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    threads = str(max(1, (os.cpu_count() or 1) // num_processes))
    for rank in range(num_processes):
        yield common | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(num_processes),
            "LOCAL_WORLD_SIZE": str(num_processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads),
        }


def _signal_all(workers: list[subprocess.Popen[bytes]], signum: int) -> None:
    for worker in workers:
        if worker.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                worker.send_signal(signum)


def end_with_launcher() -> None:
    """In a worker: ask Linux for SIGTERM when the launcher dies, kill -9 included, so that no orphan is left."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def raise_on_signals() -> None:
    """In a worker: turn SIGINT and SIGTERM into Stopped, and end the process GRACE_S later come what may.

    A Python handler does not run while the main thread sits in a collective, so a thread fed by the wakeup
    file descriptor holds the deadline.
    """

    def stop(signum: int, frame: FrameType | None) -> None:
        raise Stopped(signum)

    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, stop)

    def watch() -> None:
        # Other signals with a Python handler also write their number here.
        while (signum := os.read(reader, 1)[0]) not in (signal.SIGINT, signal.SIGTERM):
            pass
        time.sleep(GRACE_S)
        os._exit(128 + signum)

    threading.Thread(target=watch, daemon=True, name="grace").start()


def record_exit(run_dir: Path, code: int, message: str) -> bool:
    """Write exit.json unless another rank or the launcher has; return whether this call wrote it."""
    try:
        with open(run_dir / "exit.json", "x") as file:
            json.dump({"code": code, "message": message}, file, indent=2)
            file.write("\n")
    except FileExistsError:
        return False
    return True
