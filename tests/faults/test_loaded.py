"""A rank that is slow is not dead: on a machine with ten times as many busy processes as cores no alarm is raised."""

import os
import subprocess
import sys
import time

import pytest

from tests.faults.test_faults import ROOT, free_port

RANKS, STEPS, BUSY, LIMIT = 8, 100, 20, 1200.0


@pytest.mark.nightly
def test_no_false_alarm_under_load(tmp_path):
    port, inside = free_port(), {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(BUSY)]
    ranks, began = [], time.time()
    try:
        for rank in range(RANKS):
            words = [sys.executable, "-m", "tests.faults.loaded", *map(str, (rank, RANKS, port, STEPS))]
            with (tmp_path / f"rank-{rank}").open("w") as out:
                ranks.append(
                    subprocess.Popen(
                        words, env={**os.environ, **inside}, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT
                    )
                )
        while any(p.poll() is None for p in ranks) and time.time() - began < LIMIT:
            time.sleep(1)
    finally:
        for p in [*busy, *ranks]:
            p.kill()
            p.wait()
    said = "\n".join(f"rank {rank}: {(tmp_path / f'rank-{rank}').read_text()}" for rank in range(RANKS))
    print(f"{RANKS} ranks, {STEPS} steps beside {BUSY} busy processes: {time.time() - began:.0f} s\n{said}")
    assert all(p.returncode == 0 for p in ranks), said
    assert said.count(f"done {STEPS}") == RANKS
    assert "gives up" not in said
