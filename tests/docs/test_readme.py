"""The README: its Python says what it says, it is short, and its links lead somewhere. (`test_pages` runs it, too.)"""

import os
import re
import resource
import subprocess
import time

import pytest

from dtensor.testing import with_ranks
from tests.docs.pages import README, ROOT, run_blocks

TEXT = (ROOT / "README.md").read_text()
SOON = 300.0
"""Seconds of CPU from a clone to a model that is trained, compiled and inspected: on a machine with nothing else to do
and two cores, and with pip's files at hand, it takes no longer than that."""


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param(None, marks=pytest.mark.nightly)])
@with_ranks(2)
def test_python_of_the_readme_runs(rank, inner):
    names = run_blocks(README, inner=inner)
    assert names["y"].full_tensor()[0].tolist() == [5.0, 14.0, 23.0, 32.0]
    assert names["model"][0].weight.placements[0].is_shard(0)
    assert names["compiled"](names["torch"].ones(8, 64)).shape == (8, 64)


@pytest.mark.nightly
def test_from_clone_to_report(tmp_path):
    """The README's commands, as they stand there, and nothing else."""
    clone, took, said = tmp_path / "dtensor", {}, ""
    used_before = _seconds_of_children()
    (script,) = re.findall(r"^```python\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)
    shell = "".join(re.findall(r"^```bash\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)).splitlines()
    commands = [f"git clone -q {ROOT} {clone}", *[line for line in shell if not line.endswith("pytest")]]
    outside = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "DTENSOR", "VIRTUAL_ENV"))}
    for command in commands:
        began = time.monotonic()
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=clone if took else tmp_path,
            env={**outside, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        took[command] = time.monotonic() - began
        print(f"{took[command]:.0f} s: {command}")
        assert done.returncode == 0, done.stdout
        said += done.stdout
        (clone / "train.py").write_text(script)
    assert len(commands) == 4
    for words in (
        "The losses agree",
        "step 2: loss",
        "Most exposed collectives",
        "The full report: dtensor-dump/index",
    ):
        assert words in said
    used = _seconds_of_children() - used_before
    print(f"{sum(took.values()):.0f} s, of CPU {used:.0f} s")
    assert used < SOON, took


def _seconds_of_children():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_is_short():
    assert len(TEXT.splitlines()) < 120


def test_one_command_is_that_of_ci():
    assert len(re.findall(r"^python3 -m venv .*pytest$", TEXT, flags=re.MULTILINE)) == 1
    assert len(re.findall(r"^python3 -m venv .*dtensor demo$", TEXT, flags=re.MULTILINE)) == 1


def test_its_links_lead_to_files():
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", TEXT) if ":" not in link]
    assert len(links) > 20
    assert [link for link in links if not (ROOT / link).exists()] == []
