"""A rank is killed, raises, stays away or does something else, anywhere in a program: the others end in an error soon,
and what was saved is there."""

import json
import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from dtensor import Checkpoints
from tests.interpreter import python

ROOT = Path(__file__).resolve().parents[2]
SOON = 30.0
"""Seconds that the others have."""

SILENT = 60.0
"""Seconds that they have if only the signs of life of the victim end."""

PLACES = ("start", "mesh", "eager", "compile", "step", "graph", "backward", "save", "load")
DEFAULT = [("compile", "caught", 1, 2)]
"""Where, what, the victim, the number of ranks: what others learn while they compile. Beside it
`tests/compile/backends/test_agreement.py` has graphs that differ, `tests/examples/test_resume.py` a death in a save."""

ALL = [
    *[(where, what, victim, 2) for where in PLACES for what in ("killed", "raised", "absent") for victim in (0, 1)],
    *[(where, what, 3, 4) for where in PLACES for what in ("killed",)],
    # Its connections stay open, as those of a host that has lost its power: only the signs of life end.
    *[(where, "stopped", victim, 2) for where in ("eager", "step", "backward", "save") for victim in (0, 1)],
    ("compile", "caught", 0, 2),
    ("compile", "caught", 3, 4),
    *[(where, "elsewhere", victim, 2) for where in ("agreement", "known", "known sum") for victim in (0, 1)],
    *[(where, "elsewhere", 3, 4) for where in ("agreement", "known", "known sum")],
]


def cases():
    for case in DEFAULT:
        yield pytest.param(*case, id="-".join(map(str, case)))
    for case in ALL:
        if case not in DEFAULT:
            yield pytest.param(*case, id="-".join(map(str, case)), marks=pytest.mark.nightly)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(case, rank, port, folder):
    words = [python(), "-m", "tests.faults.victim", json.dumps(case), str(rank), str(port), str(folder)]
    inside = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with (folder / f"rank-{rank}").open("w") as said:
        return subprocess.Popen(words, env={**os.environ, **inside}, cwd=ROOT, stdout=said, stderr=subprocess.STDOUT)


def ended(processes, folder, limit):
    """rank -> exit code of the processes that end in time; the others write their stacks and are killed."""
    fault, started = folder / "fault", time.time()
    while any(p.poll() is None for p in processes.values()):
        since = float(fault.read_text() or "inf") if fault.exists() else started + 120
        if time.time() - since > limit:
            break
        time.sleep(0.1)
    codes = {rank: p.poll() for rank, p in processes.items()}
    for p in processes.values():
        if p.poll() is None:
            p.send_signal(signal.SIGUSR1)
    time.sleep(0.3)
    for p in processes.values():
        p.kill()
        p.wait()
    return codes


@pytest.mark.parametrize(("where", "what", "victim", "ranks"), [*cases()])
def test_the_others_end_in_an_error(where, what, victim, ranks, tmp_path):
    case = {"where": where, "what": what, "victim": victim, "ranks": ranks}
    port = free_port()
    processes = {rank: start(case, rank, port, tmp_path) for rank in range(ranks)}
    others = {rank: p for rank, p in processes.items() if rank != victim or what == "elsewhere"}
    try:
        codes = ended(others, tmp_path, SILENT if what == "stopped" else SOON)
    finally:
        for p in processes.values():
            p.kill()
            p.wait()
    said = {rank: (tmp_path / f"rank-{rank}").read_text() for rank in range(ranks)}
    shown = "\n".join(f"rank {rank}, exit {codes.get(rank)}:\n{text}" for rank, text in said.items())
    assert (tmp_path / "fault").exists(), shown
    assert all(code == 1 for code in codes.values()), shown
    if what == "caught":
        assert all("RuntimeError: the fault" in said[rank] for rank in codes), shown
    if what == "elsewhere":
        assert all(re.search(r"communicate differently", said[rank]) for rank in codes), shown
    kept = tmp_path / "checkpoints"
    if where in ("step", "graph", "backward", "save"):
        assert Checkpoints(kept).newest() == 2
    if where == "load":
        assert Checkpoints(kept).newest() == 4
