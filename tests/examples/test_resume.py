"""examples/train.py under torchrun: a rank dies while saving, the run goes on, on fewer ranks too, as if nothing had
happened."""

import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parent.parent / "examples"
EVERY = 4


def torchrun(nproc, *command, restarts=0):
    """What the ranks print; the command has to succeed."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    words += ["--nproc-per-node", str(nproc), "--max-restarts", str(restarts), *map(str, command)]
    inside = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, env={**os.environ, **inside}, text=True, **pipes) as process:
        try:
            out, errors = process.communicate(timeout=580)
        except subprocess.TimeoutExpired:
            process.terminate()  # by which the launcher ends the ranks
            raise
    assert process.returncode == 0, errors
    return out


def curve(*texts):
    """Step -> loss; a step that is done again counts as it was the last time."""
    lines = [line for text in texts for line in re.findall(r"step (\d+) loss (\S+)", text)]
    return {int(step): float(loss) for step, loss in lines}


def uninterrupted(steps):
    """The curve of one device."""
    parts, losses = runpy.run_path(str(EXAMPLES / "model.py")), {}
    torch.manual_seed(0)
    model, batch = parts["Model"](), parts["batch"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(1, steps + 1):
        tokens, targets = batch(step)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = loss.item()
    return losses


CASES = [
    pytest.param(2, 1, [], id="saved in the foreground"),
    pytest.param(4, 1, ["--background"], id="in the background"),
    pytest.param(4, 0, ["--background", "--compile"], id="the first rank, compiled"),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("ranks", "rank", "options"), CASES)
def test_the_curve_is_that_of_a_run_that_nothing_has_interrupted(tmp_path, ranks, rank, options):
    """Tensor parallel, four ranks in two dimensions; one dies in the second save; then half as many, fully sharded."""
    train = [EXAMPLES / "train.py", "--folder", tmp_path, "--every", EVERY, *options]
    dying = [HERE / "dying.py", rank, 2 * EVERY, *train]
    first = torchrun(ranks, *dying, "--tp", 2, "--steps", 3 * EVERY, restarts=1)
    assert f"goes on after step {EVERY}\n" in first
    assert sorted(os.listdir(tmp_path)) == [f"step-{n * EVERY:08d}" for n in (1, 2, 3)]
    second = torchrun(ranks // 2, *train, "--tp", 1, "--steps", 4 * EVERY)
    assert f"goes on after step {3 * EVERY}\n" in second
    wanted = uninterrupted(4 * EVERY)
    assert curve(first, second) == pytest.approx(wanted, abs=2e-5)
    assert wanted[4 * EVERY] < 0.7 * wanted[1]


@pytest.mark.nightly
def test_one_process_dies_and_is_started_again(tmp_path):
    """Without a launcher, in the second save."""
    one = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    environment = {**os.environ, **one, "TORCHELASTIC_RESTART_COUNT": "0", "PYTHONPATH": str(EXAMPLES.parent)}
    train = [EXAMPLES / "train.py", "--folder", tmp_path, "--every", EVERY, "--steps", 3 * EVERY]
    done = []
    for first in ([HERE / "dying.py", 0, 2 * EVERY], []):
        command = [sys.executable, *map(str, [*first, *train])]
        done.append(subprocess.run(command, env=environment, text=True, capture_output=True, timeout=580))
    assert [p.returncode for p in done] == [-signal.SIGKILL, 0], done[1].stderr
    assert f"goes on after step {EVERY}\n" in done[1].stdout
    assert sorted(os.listdir(tmp_path)) == [f"step-{n * EVERY:08d}" for n in (1, 2, 3)]
    assert curve(*(p.stdout for p in done)) == pytest.approx(uninterrupted(3 * EVERY), abs=2e-5)
