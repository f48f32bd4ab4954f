"""Ranks as processes, on this machine's loopback or in two namespaces joined by a link that can be made slow.

`on_ranks` starts the ranks as `python -m bench.ranks FOLDER RANK`. Each calls `fn(rank, *args, end)` in a process group
that counts, and sends over gloo. If a rank fails, or the time is up, one exception holds the output of the ranks and
their stacks.
"""

import faulthandler
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dtensor.testing.references import FunctionReference

from .counting import over_gloo
from .namespaces import End

STACKS_SIGNAL, GRACE = signal.SIGUSR1, 2.0
"""The signal that makes a rank print its stacks, and the seconds it has for that."""
PORT = 29500


class RanksFailed(RuntimeError):
    """A rank failed, or was not done in time."""


def on_ranks(
    fn: Callable[..., Any], nproc: int, *args: Any, ends: tuple[End, End] | None = None, timeout: float = 600.0
) -> Any:
    """Call `fn(rank, *args, end)` on `nproc` ranks, and return the result of the first.

    Args:
        fn: a function at the top level of a module.
        nproc: number of ranks.
        args: further arguments, which are pickled.
        ends: the ends of the link, each of which gets half of the ranks; None for loopback. `fn` receives the end of
            its rank, or None.
        timeout: seconds in which all ranks must be done.

    Raises:
        RanksFailed: a rank failed, or was not done in time.
    """
    with tempfile.TemporaryDirectory(prefix="dtensor-bench-") as name:
        folder, ranks = Path(name), []
        where = f"tcp://{ends[0].address}:{PORT}" if ends else f"file://{folder}/rendezvous"
        try:
            for rank in range(nproc):
                end = ends[rank * 2 // nproc] if ends else None
                job = (FunctionReference.of(fn), rank, nproc, where, timeout, args, end)
                (folder / f"job-{rank}").write_bytes(pickle.dumps(job))
                inside = ["ip", "netns", "exec", end.namespace] if end else []
                words = [*inside, sys.executable, "-m", "bench.ranks", str(folder), str(rank)]
                with (folder / f"log-{rank}").open("w") as log:
                    made = subprocess.Popen(
                        words, stdout=log, stderr=log, env=_environment(end.device if end else "lo")
                    )
                ranks.append(made)
            _wait(ranks, folder, time.monotonic() + timeout)
            return pickle.loads((folder / "result-0").read_bytes())
        finally:
            for process in ranks:
                process.kill()
                process.wait()


def _environment(device: str) -> dict[str, str]:
    root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {"GLOO_SOCKET_IFNAME": device, "TP_SOCKET_IFNAME": device, "OMP_NUM_THREADS": "1", "DTENSOR_LINKS": ""}
    own["TORCH_FR_BUFFER_SIZE"] = "0"  # torch 2.15 cannot record a group that wraps another
    return {**os.environ, **own, "PYTHONPATH": path}


def _wait(ranks: list[subprocess.Popen], folder: Path, deadline: float) -> None:
    while any(r.poll() is None for r in ranks):
        if time.monotonic() > deadline or any(r.poll() for r in ranks):
            break
        time.sleep(0.1)
    if all(r.returncode == 0 for r in ranks):
        return
    how = ["was not done in time" if r.poll() is None else f"ended with {r.returncode}" for r in ranks]
    for r in ranks:
        if r.poll() is None:
            r.send_signal(STACKS_SIGNAL)  # ends a rank that has not registered its handler yet
    time.sleep(GRACE)
    logs = [(folder / f"log-{i}").read_text()[-6000:] for i in range(len(ranks))]
    raise RanksFailed("\n".join(f"rank {i} {h}:\n{log}" for i, (h, log) in enumerate(zip(how, logs))))


def be_rank(folder: Path, own: int) -> None:
    """Run the job of a rank in its process."""
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    torch.set_num_threads(1)
    fn, rank, nproc, where, timeout, args, end = pickle.loads((folder / f"job-{own}").read_bytes())
    over_gloo(rank, nproc, where, timeout)
    found = fn.load()(rank, *args, end)
    (folder / f"result-{rank}").write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


__all__ = ["RanksFailed", "on_ranks"]

if __name__ == "__main__":
    be_rank(Path(sys.argv[1]), int(sys.argv[2]))
