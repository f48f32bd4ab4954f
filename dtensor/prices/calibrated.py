"""The file of measured links: `dtensor calibrate` writes it, and `dtensor.prepare` reads it for the planner.

There is one JSON file per user, $XDG_CACHE_HOME/dtensor/links.json or ~/.cache/dtensor/links.json. The environment
variable DTENSOR_LINKS names another one; if it is set but empty, no file is used. For each machine, backend and device
type the file holds the constants of the link within a host and of the link between hosts, as far as they were measured.
The file of one rank counts for all: only `dtensor.prepare` reads it, on the first rank of a mesh, and broadcasts it.
"""

import json
import os
import platform
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from ..errors import ArgumentError
from .links import INTER, INTRA, Link
from .machine import Machine

SWITCH = "DTENSOR_LINKS"
"""The environment variable that names the file; set but empty, it turns the file off."""

FORMAT = "dtensor links 1"
"""The value of the file's "format" entry."""

UNITS = {
    "start": "seconds per collective",
    "alpha": "seconds per round",
    "bandwidth": "bytes per second",
    "launch": "seconds per local copy",
    "memory": "bytes per second",
}
"""The constants of a `Link` and their units."""

KINDS = ("inter", "intra")
"""The links of a machine: between hosts, and within a host."""

MACHINE = "machine"
"""The entry of a machine that says what its ranks compute with."""


@dataclass(frozen=True)
class Measured:
    """The measured links of a machine.

    Attributes:
        inter: The link between hosts, None if it was not measured.
        intra: The link within a host, None if it was not measured.
        machine: What a rank computes with, None if it was not measured.
    """

    inter: Link | None = None
    intra: Link | None = None
    machine: Machine | None = None

    @property
    def links(self) -> tuple[Link, Link]:
        """The links (between hosts, within a host) to plan with; defaults where none was measured.

        If only the link within a host was measured, the one between hosts is no better than it in any constant.
        """
        inter = self.inter or (self.intra.and_(INTER) if self.intra else INTER)
        return inter, self.intra or INTRA


def links_path() -> Path | None:
    """Path of the file, which may not exist; None if the file is turned off."""
    given = os.environ.get(SWITCH)
    if given is not None:
        return Path(given) if given else None
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if os.path.isabs(cache) else Path.home() / ".cache") / "dtensor" / "links.json"


def machine_key(backend: str, device_type: str) -> str:
    """Key of this machine's entry in the file."""
    return f"{platform.node()} {backend} {device_type}"


def read_links(path: Path) -> dict[str, Measured]:
    """The entries of a file; empty if there is no file.

    Raises:
        ValueError: It is damaged or is some other file; the message names it.
        OSError: It cannot be read.
    """
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return {}
    try:
        content = json.loads(text)
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']!r}, not {FORMAT!r}")
        return {key: _measured(kinds) for key, kinds in content["links"].items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ArgumentError(
            f"{path} is not a file of measured links ({error}); remove it and run `dtensor calibrate`, "
            f"or name another in {SWITCH}"
        ) from error


def _link(constants: Mapping[str, Any]) -> Link:
    numbers = {name: float(constants[name]) for name in UNITS}
    for name, value in numbers.items():
        if not (isfinite(value) and value >= 0) or (name in ("bandwidth", "memory") and value == 0):
            raise ValueError(f"{name} cannot be {value} {UNITS[name]}")
    return Link(**numbers)


def _measured(kinds: Mapping[str, Any]) -> Measured:
    links = {kind: _link(constants) for kind, constants in kinds.items() if kind != MACHINE}
    machine = _machine(kinds[MACHINE]) if MACHINE in kinds else None
    return Measured(**links, machine=machine)


def _machine(constants: Mapping[str, Any]) -> Machine:
    numbers = {name: float(value) for name, value in constants.items()}
    for name, value in numbers.items():
        if not (isfinite(value) and value >= 0):
            raise ValueError(f"{name} of a machine cannot be {value}")
    return Machine(**numbers)


def links_here(backend: str, device_type: str) -> Measured:
    """The links that the file holds for this machine; none, with a warning, if it cannot be read."""
    path = links_path()
    if path is None:
        return Measured()
    try:
        if os.environ.get(SWITCH) and not path.exists():
            raise ArgumentError(f"{SWITCH} names {path}, which does not exist; write it with `dtensor calibrate`")
        return read_links(path).get(machine_key(backend, device_type), Measured())
    except (ValueError, OSError) as error:
        warnings.warn(f"plans use default links: {error}", stacklevel=2)
        return Measured()


__all__ = [
    "FORMAT",
    "KINDS",
    "MACHINE",
    "SWITCH",
    "UNITS",
    "Measured",
    "links_here",
    "links_path",
    "machine_key",
    "read_links",
]
