"""The server that programs are forked from: `python server.py FOLDER MODULE...` listens at the socket FOLDER/socket.

It imports these modules, and no more. For each command that a client sends it forks a
process, tells the client its exit code, passes on the signals that the client sends, and kills it if the client dies.
It ends when its standard input is closed.
"""

import contextlib
import gc
import importlib
import marshal
import os
import random
import runpy
import selectors
import shutil
import signal
import socket
import sys
import types
import warnings
from typing import Any

READ_AT_IMPORT = ("TORCH", "PYTORCH", "OMP_", "MKL_", "PYTHON")
"""Prefixes of environment variables that Python or what is preloaded may have read; where one is another than here,
the command is run by a new Python."""
READ_LATER = (
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "TORCHELASTIC_",
    "TORCH_NCCL_",
    "PYTHONPATH",
    "PYTHON_EXEC",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
)
"""Prefixes of variables with such a prefix that are read later, or applied here."""

Command = tuple[list[str], str, dict[str, str]]
"""Arguments of Python, working directory, environment."""


def read_at_import(environment: dict[str, str]) -> dict[str, str]:
    return {k: v for k, v in environment.items() if k.startswith(READ_AT_IMPORT) and not k.startswith(READ_LATER)}


class Server:
    """Forks a process for each command."""

    def __init__(self, folder: str) -> None:
        self.folder, self.selector = folder, selectors.DefaultSelector()
        self.listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listening.bind(os.path.join(folder, "socket"))
        self.listening.listen()
        self.selector.register(self.listening, selectors.EVENT_READ, self.accepted)
        self.selector.register(0, selectors.EVENT_READ, self.end)

    def serve(self) -> Command:
        """Answer clients; return, in a forked process, the command that it is to run."""
        while True:
            for key, _ in self.selector.select():
                command = key.data() if key.fileobj in self.selector.get_map() else None
                if command is not None:
                    return command

    def end(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        os._exit(0)

    def accepted(self) -> Command | None:
        client, _ = self.listening.accept()
        head, descriptors, _, _ = socket.recv_fds(client, 8, 3)
        if len(head) < 8:
            client.close()
            return None
        with client.makefile("rb") as file:
            arguments, folder, environment = marshal.loads(file.read(int.from_bytes(head, "big")))
        command = arguments, folder, {os.fsdecode(k): os.fsdecode(v) for k, v in environment.items()}
        pid = os.fork()
        if pid == 0:
            self.selector.close()
            self.listening.close()
            client.close()
            for standard, given in enumerate(descriptors):
                os.dup2(given, standard)
            os.closerange(3, max(descriptors) + 1)
            return command
        for descriptor in descriptors:
            os.close(descriptor)
        ended = os.pidfd_open(pid)
        self.selector.register(client, selectors.EVENT_READ, lambda: self.told(client, pid))
        self.selector.register(ended, selectors.EVENT_READ, lambda: self.ended(client, pid, ended))
        return None

    def told(self, client: socket.socket, pid: int) -> None:
        """Pass on the signals that the client has received; if it is gone, kill its process."""
        numbers = client.recv(16) or bytes([signal.SIGKILL])
        for number in numbers:
            os.kill(pid, number)
        if signal.SIGKILL in numbers:
            self.selector.unregister(client)

    def ended(self, client: socket.socket, pid: int, ended: int) -> None:
        _, status = os.waitpid(pid, 0)
        self.selector.unregister(ended)
        os.close(ended)
        with contextlib.suppress(KeyError):
            self.selector.unregister(client)
        with contextlib.suppress(ConnectionError):
            client.send(os.waitstatus_to_exitcode(status).to_bytes(4, "big", signed=True))
        client.close()


def run(command: Command, path: list[str]) -> None:
    """Run the command in this process as Python would."""
    arguments, folder, environment = command
    os.chdir(folder)
    options, known = [], read_at_import(environment) == read_at_import(dict(os.environ))
    rest = list(arguments)
    while rest and rest[0] in ("-u", "-W"):
        if rest.pop(0) == "-W":
            options.append(rest.pop(0))
    if not known or not rest or (rest[0].startswith("-") and rest[0] not in ("-c", "-m")):
        os.execve(sys.executable, [sys.executable, *arguments], environment)
    os.environ.clear()
    os.environ.update(environment)
    random.seed()
    sys.modules["numpy"].random.seed()
    sys.modules["torch"].seed()
    for option in options:
        warnings._setoption(option)  # type: ignore[attr-defined]
    first, *words = rest
    given = [p for p in environment.get("PYTHONPATH", "").split(os.pathsep) if p]
    beginning = {"-c": "", "-m": folder}.get(first, os.path.dirname(os.path.abspath(first)))
    sys.path[:] = [beginning, *given, *path]
    importlib.invalidate_caches()
    if first == "-c":
        sys.argv[:] = ["-c", *words[1:]]
        main: Any = types.ModuleType("__main__")
        main.__dict__["__builtins__"] = __builtins__
        sys.modules["__main__"] = main
        exec(compile(words[0], "<string>", "exec"), vars(main))
    elif first == "-m":
        sys.argv[:] = words
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = rest
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    installed = sys.path[1:]
    gc.disable()
    for name in sys.argv[2:]:
        importlib.import_module(name)
    assert "dtensor" not in sys.modules, "this library is to read its environment anew in each program"
    assert len(os.listdir("/proc/self/task")) == 1, "threads would not be there in forked processes"
    gc.enable()
    gc.collect()
    gc.freeze()
    server = Server(sys.argv[1])
    os.write(1, b"ready\n")
    run(server.serve(), installed)
