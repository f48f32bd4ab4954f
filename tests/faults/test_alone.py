"""Only some ranks run something that communicates: all end in an error soon that says who waits where, or none does if
a rank only takes its time."""

import os
import re
import subprocess
import time

import pytest

from tests.faults.alone import PROGRAMS
from tests.faults.test_faults import ROOT, free_port
from tests.interpreter import python

SOON = 30.0
"""Seconds from where the ranks part until all of them have ended."""

DEFAULT = ("caught_then_barrier",)


def programs():
    return [pytest.param(name, marks=[] if name in DEFAULT else pytest.mark.nightly) for name in PROGRAMS]


@pytest.mark.parametrize("name", programs())
def test_all_ranks_end_soon(name, tmp_path):
    ranks, says = PROGRAMS[name]
    port, inside = free_port(), {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    processes, files = [], [tmp_path / f"rank-{rank}" for rank in range(ranks)]
    for rank, file in enumerate(files):
        words = [python(), "-m", "tests.faults.alone", name, *map(str, (rank, ranks, port))]
        with file.open("w") as out:
            processes.append(
                subprocess.Popen(words, env={**os.environ, **inside}, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
            )
    parted = started = time.time()
    try:
        while any(p.poll() is None for p in processes):
            found = [re.search(r"^fault (\S+)$", file.read_text(), re.MULTILINE) for file in files]
            parted = max(float(f[1]) if f else started + 90 for f in found)
            if time.time() - parted > SOON + 20 * (says is None):
                break
            time.sleep(0.1)
    finally:
        hang = [rank for rank, p in enumerate(processes) if p.poll() is None]
        for p in processes:
            p.kill()
            p.wait()
    said = {rank: file.read_text() for rank, file in enumerate(files)}
    shown = "\n".join(f"rank {rank}, exit {processes[rank].returncode}:\n{text}" for rank, text in said.items())
    print(f"{name}: {ranks} ranks, {time.time() - parted:.1f} s until all had ended")
    assert not hang, shown
    if says is None:
        assert all(p.returncode == 0 for p in processes), shown
        assert re.search(r"rank 1 waits in .*alone.py:\d+ since \d+ s: rank 0 computes at .*alone.py:\d+", said[1]), (
            shown
        )
        return
    assert any(p.returncode == 1 for p in processes), shown
    left = [rank for rank, p in enumerate(processes) if p.returncode == 0 and "has left the program" in shown]
    for rank, text in said.items():
        if says and rank not in left:
            assert processes[rank].returncode == 1, shown
            assert re.search(says, text, re.DOTALL), shown
            assert re.search(r"alone\.py:\d+", text) or not says.startswith("rank "), shown
