"""Reads a dump: its ranks, and the manifests of their frames."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtensor.errors import ArgumentError

from .measured import FILE, FORMAT, attach

RANK = re.compile(r"rank(\d+)")


@dataclass(frozen=True)
class Dumped:
    """A frame of a dump.

    Attributes:
        rank: the rank that wrote it.
        name: name of its folder, such as `000_forward`.
        folder: path of its folder.
        manifest: see `dtensor.compile.recording.manifest`; None if no graph was made of the frame.
    """

    rank: int
    name: str
    folder: Path
    manifest: dict[str, Any] | None


def read(root: Path) -> list[Dumped]:
    """Return the frames of a dump, by rank and in the order in which they were compiled.

    Raises:
        ValueError: there is no dump, or a manifest in it is damaged.
    """
    ranks = {int(m[1]): path for path in root.glob("rank*") if (m := RANK.fullmatch(path.name))}
    if not ranks:
        raise ArgumentError(
            f"{root} holds no dump; write one with `dtensor inspect SCRIPT` or options={{'dump': folder}}"
        )
    frames = [_frame(rank, path) for rank in sorted(ranks) for path in sorted(ranks[rank].iterdir()) if path.is_dir()]
    for rank, path in ranks.items():
        if (path / FILE).exists():
            mine = [f for f in frames if f.rank == rank and f.manifest]
            attach(_measured(path / FILE), [f.name for f in mine], [f.manifest or {} for f in mine])
    return frames


def _measured(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ArgumentError(f"{file} is damaged ({error}); measure again") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ArgumentError(f"{file} is no file of measured times; remove it, or measure again")
    return found


def _frame(rank: int, path: Path) -> Dumped:
    file = path / "manifest.json"
    return Dumped(rank, path.name, path, read_manifest(file) if file.exists() else None)


def read_manifest(file: Path) -> dict[str, Any]:
    """Return the content of a `manifest.json`.

    Raises:
        ValueError: it is damaged.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ArgumentError(f"{file} is damaged ({error}); dump again") from error
    if not isinstance(found, dict) or not isinstance(found.get("collectives"), list):
        raise ArgumentError(f"{file} is not the manifest of a frame: it lists no collectives; dump again")
    return found


def communicating(frames: list[Dumped], rank: int) -> list[tuple[Dumped, dict[str, Any]]]:
    """Return the collectives of a rank, each with the frame it is in."""
    return [(f, c) for f in frames if f.rank == rank and f.manifest for c in f.manifest["collectives"]]


__all__ = ["Dumped", "communicating", "read", "read_manifest"]
