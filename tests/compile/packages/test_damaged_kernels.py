"""A library of a kernel that a killed process left half written is built again."""

import subprocess
import sys

import pytest

PROGRAM = """
import torch
import dtensor.compile

print(torch.compile(lambda x: (x * 3).sin() + x.cos())(torch.arange(64.0)).sum().item())
"""


@pytest.mark.nightly
def test_it_is_built_again(own_caches):
    def run():
        done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=200)
        assert done.returncode == 0, done.stderr
        return done.stdout

    expected = run()
    libraries = list(own_caches.rglob("*.main.so"))
    assert libraries
    for path in libraries:
        path.write_bytes(b"")
    assert run() == expected
    assert all(path.stat().st_size > 1000 for path in libraries)
