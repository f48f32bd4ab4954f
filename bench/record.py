"""Records: one figure of a case, as a line of JSON, with the machine and the versions it was taken on.

A record compares `side` with `peer`. `ratio` is below one where `side` is better, for all figures: each is of something
of which less is better. Of timed figures it is the median of the ratios of rounds, `spread` their quartiles; counted
ones have no spread. A record without a ratio says in `note` why: a side that does not run, a case that was skipped.
"""

import functools
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

import dtensor

from .timing import Ratio

ROOT = Path(__file__).resolve().parent.parent
OURS = "dtensor"
"""The side that everything is compared with."""


@dataclass(frozen=True)
class Record:
    """One figure.

    Attributes:
        case: the case it belongs to.
        figure: what was measured, in words.
        value: of `side`, in `unit`.
        unit: "ms", "bytes", "collectives", ...
        side: who is measured.
        peer: whom it is compared with; empty for a figure that stands alone.
        peer_value: of `peer`, in `unit`.
        ratio: `side` to `peer`.
        spread: first and third quartile of the ratio.
        model, plan, ranks, link: what was trained, how it was sharded, over how many ranks, on what wire.
        note: what else there is to say, or why there is no value.
        machine, versions: where.
    """

    case: str
    figure: str
    value: float | None
    unit: str
    side: str = OURS
    peer: str = ""
    peer_value: float | None = None
    ratio: float | None = None
    spread: tuple[float, float] | None = None
    model: str = ""
    plan: str = ""
    ranks: int = 1
    link: str = ""
    note: str = ""
    machine: dict[str, Any] | None = None
    versions: dict[str, str] | None = None


@dataclass(frozen=True)
class Setting:
    """Where figures are taken, and the records of them: case, model, plan, ranks, link."""

    case: str
    model: str = ""
    plan: str = ""
    ranks: int = 1
    link: str = ""

    def alone(self, figure: str, value: float | None, unit: str, side: str = OURS, note: str = "") -> Record:
        """A figure without a peer."""
        return self._made(figure, value, unit, side=side, note=note)

    def counted(
        self, figure: str, unit: str, value: float, peer: str, peer_value: float, side: str = OURS, note: str = ""
    ) -> Record:
        """A figure that is exact. Two zeros are equal; there is no ratio to a zero."""
        ratio = value / peer_value if peer_value else 1.0 if value == peer_value else None
        return self._made(figure, value, unit, side=side, peer=peer, peer_value=peer_value, ratio=ratio, note=note)

    def timed(self, figure: str, unit: str, found: Ratio, peer: str, side: str = OURS, note: str = "") -> Record:
        """A figure of interleaved rounds."""
        return self._made(
            figure,
            found.value,
            unit,
            side=side,
            peer=peer,
            peer_value=found.peer_value,
            ratio=found.ratio,
            spread=found.spread,
            note=note,
        )

    def missing(self, figure: str, note: str, peer: str = "", side: str = OURS) -> Record:
        """A figure that could not be taken, and why."""
        return self._made(figure, None, "", side=side, peer=peer, note=note)

    def _made(self, figure: str, value: float | None, unit: str, **given: Any) -> Record:
        return Record(self.case, figure, value, unit, **given, **{k: v for k, v in asdict(self).items() if k != "case"})


@functools.cache
def machine() -> dict[str, Any]:
    """This machine: processor, cores that this process may use, memory in GB, accelerator if there is one."""
    name = next((v for k, v in _cpu_info() if k == "model name"), platform.processor() or platform.machine())
    found = {"cpu": name, "cores": len(os.sched_getaffinity(0)), "memory": round(_memory() / 1e9)}
    return found | ({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {})


@functools.cache
def versions() -> dict[str, str]:
    """Versions of Python, torch and this library, the latter with the commit where it is a checkout."""
    asked = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty"], capture_output=True, text=True)
    ours = " ".join(filter(None, [dtensor.__version__, asked.stdout.strip()]))
    return {"python": platform.python_version(), "torch": torch.__version__, "dtensor": ours}


def _cpu_info() -> Iterator[tuple[str, str]]:
    path = Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.exists() else ():
        key, _, value = line.partition(":")
        yield key.strip(), value.strip()


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def stamped(record: Record) -> Record:
    """The record with this machine and these versions."""
    return replace(record, machine=machine(), versions=versions())


def line(record: Record) -> str:
    """The record as a line of JSON."""
    return json.dumps(asdict(record), allow_nan=False)


def read(lines: Iterable[str]) -> list[Record]:
    """The records of a file.

    Raises:
        ValueError: a line is no record; the message says which.
    """
    known, found = {f.name for f in fields(Record)}, []
    for number, text in enumerate(lines, 1):
        try:
            given = json.loads(text)
            if unknown := set(given) - known:
                raise ValueError(f"unknown {sorted(unknown)}")
            given["spread"] = given.get("spread") and tuple(given["spread"])
            found.append(Record(**given))
        except (ValueError, TypeError) as error:
            raise ValueError(f"line {number} is no record of python -m bench: {error}") from error
    return found


__all__ = ["OURS", "Record", "Setting", "line", "machine", "read", "stamped", "versions"]
