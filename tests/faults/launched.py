"""A job of examples/elastic.py under torchrun on one host or several, in which something is killed now and then.

The launchers that end are started anew, as Slurm or Kubernetes would. What the ranks print goes to one file, and is
read with the time at which it was seen.
"""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from tests.faults.hosts import HERE, Host, children, is_running, kill
from tests.interpreter import python

ROOT = Path(__file__).resolve().parents[2]
SOON = "last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3,is_host=0"
"""How long torchrun waits for hosts that may come, and after which it gives one up."""

STILL = 150.0
"""Seconds without a line after which a job counts as hanging."""

LINE = re.compile(r"step (\d+) loss (\S+)|(\d+) ranks go on after step (\d+)")

RENDEZVOUS = """
import sys, time, torch.distributed as dist
store = dist.TCPStore(sys.argv[1], int(sys.argv[2]), is_master=True, wait_for_workers=False)
time.sleep(3600)
"""


@dataclass
class Started:
    """A round of the job that has begun to train: on how many ranks, after which step, when, and how many lines with a
    loss there were then."""

    ranks: int
    after: int
    at: float
    losses: int


@dataclass
class Killed:
    """A kill: of what, in which phase, after which step was printed, and when; and when nothing of that round ran."""

    what: str
    phase: str
    step: int
    at: float
    gone: float = 0.0


@dataclass
class Launched:
    """A job.

    Attributes:
        hosts: where its launchers run.
        folder: for its checkpoints, its output and its errors.
        each: ranks on a host.
        nodes: how many hosts the job needs, such as "2" or "1:2".
        options: further arguments of the example.
        steps: at which step the job ends.
        every: steps from one checkpoint to the next.
        forked: whether ranks are forked from a server, which takes less, and not started by torchrun itself: their
            parent is another then.
    """

    hosts: Sequence[Host]
    folder: Path
    each: int
    nodes: str
    steps: int
    every: int
    options: Sequence[str] = ()
    forked: bool = False
    losses: list[tuple[int, str]] = field(default_factory=list)
    rounds: list[Started] = field(default_factory=list)
    kills: list[Killed] = field(default_factory=list)

    def __enter__(self) -> "Launched":
        self.folder.mkdir()
        self.began = self.seen = time.monotonic()
        self.launchers: dict[Host, subprocess.Popen[bytes]] = {}
        self.away: set[Host] = set()
        self._read, self._watched = 0, []
        self._port = free_port()
        self._place = self._store = None
        if self.hosts[0] == HERE:  # in this process, as another would import torch for nothing else
            self._store = dist.TCPStore(HERE.address, self._port, is_master=True, wait_for_workers=False)
        else:
            self._place = self._start(self.hosts[0], "-c", RENDEZVOUS, self.hosts[0].address, self._port)
        self._keep_launched()
        return self

    def __exit__(self, *_: object) -> None:
        for host in list(self.launchers):
            self.kill_host(host)
        for pid in filter(_is_rank, {pid for _, pids in self._watched for pid in pids}):
            kill(pid)
        self._store = None
        if self._place is not None:
            self._place.kill()
            self._place.wait()

    def _start(self, host: Host, *words: object) -> "subprocess.Popen[bytes]":
        inside = {
            "GLOO_SOCKET_IFNAME": host.interface,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "DTENSOR_LINKS": "",
            # With several launchers, one that is started anew could not find the store that torchrun keeps by default.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1" if len(self.hosts) > 1 else "0",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder.parent / "inductor"),
            **({"PYTHON_EXEC": python()} if self.forked else {}),
        }
        with open(self.folder / "out", "ab") as out, open(self.folder / "errors", "ab") as errors:
            command = host.command(sys.executable, *words)
            return subprocess.Popen(command, env={**os.environ, **inside}, stdout=out, stderr=errors)

    def _keep_launched(self) -> None:
        """Start launchers that are not there, or that have ended without success."""
        for host in self.hosts:
            if host not in self.away and (host not in self.launchers or self.launchers[host].poll() not in (None, 0)):
                self.launchers[host] = self._start(host, *self._torchrun(host))

    def _torchrun(self, host: Host) -> list[object]:
        endpoint = f"{self.hosts[0].address}:{self._port}"
        words = ["-m", "torch.distributed.run", "--nnodes", self.nodes, "--nproc-per-node", self.each]
        words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "job", "--rdzv-conf", SOON]
        words += ["--local-addr", host.address, "--max-restarts", 100, ROOT / "examples" / "elastic.py"]
        numbers = ["--steps", self.steps, "--every", self.every]
        return [*words, "--folder", self.folder / "checkpoints", *numbers, *self.options]

    def look(self) -> None:
        """Start what has to be started, and read what was printed since.

        Raises:
            TimeoutError: nothing was printed for too long.
        """
        self._keep_launched()
        with open(self.folder / "out", "rb") as out:
            out.seek(self._read)
            lines = [line for line in out.read().splitlines(keepends=True) if line.endswith(b"\n")]
        self._read += sum(map(len, lines))
        now = time.monotonic()
        for found in filter(None, (LINE.match(line.decode()) for line in lines)):
            self.seen = now
            step, loss, ranks, after = found.groups()
            if step:
                self.losses.append((int(step), loss))
            else:
                self.rounds.append(Started(int(ranks), int(after), now, len(self.losses)))
        self._see_ends(now)
        if now - self.seen > STILL:
            raise TimeoutError(f"nothing was printed for {STILL} s after {self.kills[-1:]}: {self.errors()}")

    def _see_ends(self, now: float) -> None:
        for kill_, pids in self._watched:
            if not kill_.gone and not any(map(is_running, pids)):
                kill_.gone = now

    def until(self, what: Callable[[], object], limit: float) -> None:
        """Look until `what` is true.

        Raises:
            TimeoutError: it is not after `limit` seconds, or the job hangs.
        """
        end = time.monotonic() + limit
        while True:
            self.look()
            if what():
                return
            if time.monotonic() > end:
                raise TimeoutError(f"the job is at {self.losses[-1:]} after {limit} s: {self.errors()}")
            time.sleep(0.02)

    def go_on(self, seconds: float) -> None:
        """Look for some time, or until the job is done."""
        end = time.monotonic() + seconds
        self.until(lambda: self.is_done or time.monotonic() > end, seconds + 1)

    def errors(self) -> str:
        """The end of what was written to stderr."""
        return (self.folder / "errors").read_text(errors="replace")[-4000:]

    @property
    def step(self) -> int:
        """The last step that was printed; 0 if none was."""
        return self.losses[-1][0] if self.losses else 0

    @property
    def is_done(self) -> bool:
        """Whether the last step is done and saved."""
        return (self.folder / "checkpoints" / f"step-{self.steps:08d}").exists() and self.step == self.steps

    def workers(self, host: Host) -> list[int]:
        """The ranks of the host, as processes."""
        return [pid for pid in children(self.launchers[host].pid) if _is_rank(pid)] if host in self.launchers else []

    def all_run(self) -> bool:
        """Whether all ranks of a round have been started, on all hosts."""
        return all(len(self.workers(host)) == self.each for host in self.hosts if host not in self.away)

    def kill(self, what: str, host: Host, number: int = 0) -> None:
        """Kill a "worker" of a host, by its number there, its "agent" (torchrun), or the "node", which is both."""
        pids = [pid for host_ in self.hosts for pid in self.workers(host_)]
        record = Killed(what, self._phase(), self.step, time.monotonic())
        self.seen = record.at
        if what == "worker":
            kill((self.workers(host))[number % self.each])
        elif what == "agent":
            self._kill_launcher(host)
        else:
            self.kill_host(host)
        self.kills.append(record)
        self._watched.append((record, pids))

    def kill_host(self, host: Host) -> None:
        """Kill all that runs on a host for this job."""
        ranks = self.workers(host)
        self._kill_launcher(host)
        for pid in ranks:
            kill(pid)

    def _kill_launcher(self, host: Host) -> None:
        self.launchers[host].kill()
        self.launchers.pop(host).wait()

    def _phase(self) -> str:
        """What the job is doing."""
        begun = self.rounds[-1].at if self.rounds else 0.0
        if begun <= (self.kills[-1].at if self.kills else 0.0):
            return "start"
        if any((self.folder / "checkpoints").glob(".step-*.partial")):
            return "save"
        return "step" if len(self.losses) > self.rounds[-1].losses else "first step"

    def finish(self, limit: float) -> float:
        """Wait until the job is done, and its launchers have ended; one that comes too late is not started again.

        Returns:
            The seconds from the job's begin to its last step.
        """
        self.until(lambda: self.is_done, limit)
        took = time.monotonic() - self.began
        self.away.update(self.hosts)
        self.until(lambda: all(p.poll() is not None for p in self.launchers.values()), 60)
        return took

    def curve(self) -> dict[int, set[str]]:
        """Step -> the losses that were printed for it, each as often as the step was done with another result."""
        found: dict[int, set[str]] = {}
        for step, loss in self.losses:
            found.setdefault(step, set()).add(loss)
        return found


def _is_rank(pid: int) -> bool:
    try:
        return b"\0LOCAL_RANK=" in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def free_port() -> int:
    """A port that is free here."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


__all__ = ["HERE", "Killed", "Launched", "Started"]
