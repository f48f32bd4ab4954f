"""A slow link: two network namespaces joined by a veth pair, each end of which sends at a limited rate.

This needs Linux, root, and iproute2 (`ip`, `tc`). The names of namespaces and devices contain this process's id. They
are removed at the end, also after an error, but not if the process is killed. `limit` changes the rate (a tbf qdisc)
while ranks run.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

ADDRESSES = ("10.213.7.1", "10.213.7.2")
BURST, LATENCY = "128kb", "50ms"


@dataclass(frozen=True)
class End:
    """One end of the link: a namespace, its interface, and its address."""

    namespace: str
    device: str
    address: str


def why_not() -> str:
    """Return why no namespaces can be made here; "" if they can."""
    if os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        return "network namespaces need root and iproute2 (ip, tc); install iproute2 and run as root"
    done = subprocess.run(["ip", "netns", "add", f"dtensor-{os.getpid()}"], capture_output=True, text=True)
    if done.returncode:
        return f"network namespaces cannot be made here: {done.stderr.strip()}"
    command("ip", "netns", "delete", f"dtensor-{os.getpid()}")
    return ""


def command(*words: object) -> None:
    """Run a program and wait for it.

    Raises:
        RuntimeError: the program failed; the message holds its stderr.
    """
    done = subprocess.run([str(w) for w in words], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, words))}: {done.stderr.strip() or done.returncode}")


@contextlib.contextmanager
def joined() -> Iterator[tuple[End, End]]:
    """Context manager with two namespaces that are connected at full rate."""
    ends = [End(f"dtensor-{os.getpid()}-{i}", f"dt{os.getpid()}-{i}", ADDRESSES[i]) for i in range(2)]
    with contextlib.ExitStack() as made:
        for end in ends:
            command("ip", "netns", "add", end.namespace)
            made.callback(command, "ip", "netns", "delete", end.namespace)  # this removes the pair, too
        a, b = ends
        pair = ("netns", a.namespace, "type", "veth", "peer", "name", b.device, "netns", b.namespace)
        command("ip", "link", "add", a.device, *pair)
        for end in ends:
            command("ip", "-n", end.namespace, "address", "add", f"{end.address}/30", "dev", end.device)
            for device in ("lo", end.device):
                command("ip", "-n", end.namespace, "link", "set", device, "up")
        yield a, b


def limit(end: End, rate: str, burst: str = BURST) -> None:
    """Limit the rate at which `end` sends to `rate`, in tc's notation ("1gbit"). `burst` passes at once where nothing
    was sent for a while."""
    limited = ("tbf", "rate", rate, "burst", burst, "latency", LATENCY)
    command("tc", "-n", end.namespace, "qdisc", "replace", "dev", end.device, "root", *limited)


__all__ = ["End", "joined", "limit", "why_not"]
