"""A CUDA device for fake tensors where torch is a build for CPUs."""

import ctypes
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path


def pretend() -> None:
    """Have torch find a CUDA device, of which there is nothing but its name: tensors on it must be fake.

    What it asks of a device is compiled in, and is read once: call this before torch is imported.
    """
    assert "torch" not in sys.modules
    found = importlib.util.find_spec("torch")
    assert found is not None
    torch = Path(str(found.origin)).parent
    source = Path(__file__).with_suffix(".cpp")
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder, "device.so")
        command = [
            "g++",
            "-std=c++20",
            "-shared",
            "-fPIC",
            f"-I{torch}/include",
            f"-L{torch}/lib",
            "-ltorch_cpu",
            "-lc10",
        ]
        subprocess.run([*command, str(source), "-o", str(built)], check=True)
        for library in (torch / "lib" / "libc10.so", torch / "lib" / "libtorch_cpu.so", built):
            ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


__all__ = ["pretend"]
