"""Two hosts on one machine: network namespaces that a virtual cable joins."""

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Host:
    """Where processes are started.

    Attributes:
        address: its IPv4 address.
        interface: the network interface with that address.
        namespace: the network namespace; "" for that of the tests.
    """

    address: str
    interface: str
    namespace: str = ""

    def command(self, *words: object) -> list[str]:
        """The command that runs `words` on this host; it becomes that process, and keeps its id."""
        inside = ["ip", "netns", "exec", self.namespace] if self.namespace else []
        return [*inside, *map(str, words)]


HERE = Host("127.0.0.1", "lo")


def no_hosts() -> str:
    """Why network namespaces cannot be made here; "" if they can."""
    if shutil.which("ip") is None:
        return "there is no `ip` command"
    name = f"dtensor-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, timeout=30)
    if tried.returncode == 0:
        _ip("netns", "del", name)
    return f"network namespaces cannot be made: {tried.stderr.strip()}" if tried.returncode else ""


@contextlib.contextmanager
def two_hosts() -> Iterator[list[Host]]:
    """Context in which there are two hosts. At its end nothing runs on them any more, and they are gone."""
    names = [f"dtensor-{os.getpid()}-{k}" for k in (0, 1)]
    hosts = [Host(f"10.99.0.{k + 1}", f"dt{k}", name) for k, name in enumerate(names)]
    try:
        for name in names:
            _ip("netns", "add", name)
        ends = [["dt0", "netns", names[0]], ["dt1", "netns", names[1]]]
        _ip("link", "add", *ends[0], "type", "veth", "peer", "name", *ends[1])
        for host in hosts:
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", host.interface)
            _ip("-n", host.namespace, "link", "set", host.interface, "up")
            _ip("-n", host.namespace, "link", "set", "lo", "up")
        yield hosts
    finally:
        for name in names:
            for pid in processes_in(name):
                kill(pid)
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=30)


def processes_in(namespace: str) -> list[int]:
    """The processes that run in a network namespace."""
    found = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, timeout=30)
    return [int(pid) for pid in found.stdout.split()]


def children(pid: int) -> list[int]:
    """The processes that `pid` has started and that have not ended."""
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def is_running(pid: int) -> bool:
    """Whether there is such a process, and it is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def kill(pid: int, how: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to a process, if there is one."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, how)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)
