"""A slow wire: two network namespaces joined by a veth pair, each end of which sends at a limited rate.

Needs Linux, root, and iproute2 (`ip`, `tc`). Namespaces and pair carry this process's id, and are removed at the end,
however it ends, short of a kill that cannot be caught. `limit` changes the rate (a tbf qdisc) while ranks run.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

ADDRESSES = ("10.213.7.1", "10.213.7.2")
TBF = ("burst", "128kb", "latency", "50ms")


@dataclass(frozen=True)
class End:
    """A namespace, its interface, its address."""

    namespace: str
    device: str
    address: str


def why_not() -> str:
    """Why there can be no namespaces here; "" if there can."""
    if os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        return "network namespaces take root and iproute2 (ip, tc); run it as root, where both are"
    done = subprocess.run(["ip", "netns", "add", f"dtensor-{os.getpid()}"], capture_output=True, text=True)
    if done.returncode:
        return f"network namespaces cannot be made here: {done.stderr.strip()}"
    command("ip", "netns", "delete", f"dtensor-{os.getpid()}")
    return ""


def command(*words: object) -> None:
    """Run a program to its end.

    Raises:
        RuntimeError: what it complained of.
    """
    done = subprocess.run([str(w) for w in words], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, words))}: {done.stderr.strip() or done.returncode}")


@contextlib.contextmanager
def joined() -> Iterator[tuple[End, End]]:
    """Context with two namespaces that reach each other, at full rate."""
    ends = [End(f"dtensor-{os.getpid()}-{i}", f"dt{os.getpid()}-{i}", ADDRESSES[i]) for i in range(2)]
    with contextlib.ExitStack() as made:
        for end in ends:
            command("ip", "netns", "add", end.namespace)
            made.callback(command, "ip", "netns", "delete", end.namespace)  # the pair goes with them
        a, b = ends
        pair = ("netns", a.namespace, "type", "veth", "peer", "name", b.device, "netns", b.namespace)
        command("ip", "link", "add", a.device, *pair)
        for end in ends:
            command("ip", "-n", end.namespace, "address", "add", f"{end.address}/30", "dev", end.device)
            for device in ("lo", end.device):
                command("ip", "-n", end.namespace, "link", "set", device, "up")
        yield a, b


def limit(end: End, rate: str) -> None:
    """Have what leaves `end` pass at most at `rate`, as tc writes it ("1gbit")."""
    command("tc", "-n", end.namespace, "qdisc", "replace", "dev", end.device, "root", "tbf", "rate", rate, *TBF)


__all__ = ["End", "joined", "limit", "why_not"]
