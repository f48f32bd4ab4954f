"""Records: one figure of a case as a line of JSON, with the machine and the versions it was measured on.

A record compares `side` with `peer`. For all figures less is better, so `ratio` is below one if `side` is better. For
timed figures `ratio` is the median of the ratios of the rounds, and `spread` holds their quartiles; counted figures
have no spread. If a record has no value, `note` states why: a side does not run, or a case was skipped.
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
"""Name of the side of this library, which is compared with all others."""


@dataclass(frozen=True)
class Record:
    """One figure.

    Attributes:
        case: the case to which the figure belongs.
        figure: name of the figure.
        value: value of `side`, in `unit`.
        unit: "ms", "bytes", "collectives", ...
        side: the side that is measured.
        peer: the side it is compared with; empty for a figure that is not compared.
        peer_value: value of `peer`, in `unit`.
        ratio: `value` over `peer_value`; for timed figures, the median of the ratios of the rounds.
        spread: first and third quartile of the ratio.
        model: the model that was trained, or another subject of the figure.
        plan: how it was sharded.
        ranks: number of ranks.
        link: the link between the ranks.
        note: a remark, or the reason why there is no value.
        machine: the machine, see `machine`.
        versions: versions of the software, see `versions`.
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
    """The setting of several figures, which makes their records; the attributes are those of `Record`."""

    case: str
    model: str = ""
    plan: str = ""
    ranks: int = 1
    link: str = ""

    def alone(self, figure: str, value: float | None, unit: str, side: str = OURS, note: str = "") -> Record:
        """Return the record of a figure without a peer."""
        return self._made(figure, value, unit, side=side, note=note)

    def counted(
        self, figure: str, unit: str, value: float, peer: str, peer_value: float, side: str = OURS, note: str = ""
    ) -> Record:
        """Return the record of an exact figure. The ratio of two zeros is 1; there is no other ratio to zero."""
        ratio = value / peer_value if peer_value else 1.0 if value == peer_value else None
        return self._made(figure, value, unit, side=side, peer=peer, peer_value=peer_value, ratio=ratio, note=note)

    def timed(self, figure: str, unit: str, found: Ratio, peer: str, side: str = OURS, note: str = "") -> Record:
        """Return the record of a figure from interleaved rounds."""
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
        """Return the record of a figure that could not be measured; `note` states why."""
        return self._made(figure, None, "", side=side, peer=peer, note=note)

    def _made(self, figure: str, value: float | None, unit: str, **given: Any) -> Record:
        return Record(self.case, figure, value, unit, **given, **{k: v for k, v in asdict(self).items() if k != "case"})


@functools.cache
def machine() -> dict[str, Any]:
    """Return a description of this machine: CPU, number of cores this process may use, memory in GB, and any GPU."""
    name = next((v for k, v in _cpu_info() if k == "model name"), platform.processor() or platform.machine())
    found = {"cpu": name, "cores": len(os.sched_getaffinity(0)), "memory": round(_memory() / 1e9)}
    return found | ({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {})


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of Python, torch and this library, the latter with the commit if it is a checkout."""
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
    """Return the record with this machine and these versions."""
    return replace(record, machine=machine(), versions=versions())


def line(record: Record) -> str:
    """Return the record as a line of JSON."""
    return json.dumps(asdict(record), allow_nan=False)


def read(lines: Iterable[str]) -> list[Record]:
    """Return the records of a file.

    Raises:
        ValueError: a line is not a record; the message states which.
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
            raise ValueError(f"line {number} is not a record of python -m bench: {error}") from error
    return found


__all__ = ["OURS", "Record", "Setting", "line", "machine", "read", "stamped", "versions"]
