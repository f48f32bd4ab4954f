"""Python for programs that tests run by themselves: `python()` in place of `sys.executable`.

A new interpreter takes three seconds to import torch and its compilers, which a program of a test then uses for less.
`python()` gives the path of an executable that takes the arguments of Python and behaves as it: output, exit code,
environment, working directory, signals. The program runs in a process that a server (`server`) has forked, in which
torch and its compilers have been imported, and this library has not: it reads its environment anew. torchrun starts its
workers so where `PYTHON_EXEC` names the executable. In a program of `python("torch")` nothing else has been imported.
"""

import atexit
import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
COMPILERS = ("torch", "torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.tensor", "numpy.random")
"""Of these `import torch, dtensor` and the first compilation take their time."""


@functools.cache
def python(*preloaded: str) -> str:
    """The path of an executable that runs programs as this Python does, in processes that have imported `preloaded`,
    or else what compiled programs need of torch. The server ends with this process."""
    if sys.platform != "linux":
        return sys.executable
    folder = Path(tempfile.mkdtemp(prefix="python-"))
    path = folder / "python"
    path.write_text(f"#!{sys.executable} -IS\nSOCKET = {str(folder / 'socket')!r}\n{(HERE / 'client.py').read_text()}")
    path.chmod(0o700)
    how = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": {**os.environ}}
    how["env"].pop("PYTHONPATH", None)
    server = subprocess.Popen([sys.executable, str(HERE / "server.py"), str(folder), *(preloaded or COMPILERS)], **how)
    atexit.register(server.communicate)
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n", "the server of interpreters did not start"
    return str(path)


__all__ = ["python"]
