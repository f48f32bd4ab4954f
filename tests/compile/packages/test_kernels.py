"""Libraries of kernels: of a package, and those that a killed process left half written, which are built again."""

import subprocess
from unittest import mock

import pytest
from torch._inductor.codecache import CppCodeCache

from dtensor.torch_private.kernels import libraries
from tests.interpreter import python

PROGRAM = """
import torch
import dtensor.compile

print(torch.compile(lambda x: (x * 3).sin() + x.cos())(torch.arange(64.0)).sum().item())
"""


@pytest.mark.nightly
def test_it_is_built_again(own_caches):
    def run():
        done = subprocess.run([python(), "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=200)
        assert done.returncode == 0, done.stderr
        return done.stdout

    expected = run()
    libraries = list(own_caches.rglob("*.main.so"))
    assert libraries
    for path in libraries:
        path.write_bytes(b"")
    assert run() == expected
    assert all(path.stat().st_size > 1000 for path in libraries)


def test_libraries_of_a_package_are_used_for_its_frames_only(tmp_path):
    """The same source, compiled with other settings, is another library."""
    key, library = libraries._key("int f();", "cpu", None), tmp_path / "library.so"
    with libraries.using_kernels({key: library}):
        inside = libraries._load_async(CppCodeCache, "int f();")
    assert inside.__wrapped__.args == (CppCodeCache, str(library), "library")
    with mock.patch.object(libraries, "_own", return_value=lambda: "built"):
        assert libraries._load_async(CppCodeCache, "int f();")() == "built"
