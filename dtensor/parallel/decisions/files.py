"""Decisions as text: what a dump holds of them, and what may be given for them instead.

    decisions.json of a dump -> options={"decide": folder} -> the layouts as they stand there, for the program dumped

    {"program": "…", "mesh": {"tp": 2}, "seconds": 0.25, "bound": 0.25, "operators": [
     {"operator": "aten.mm.default", "module": "up", "backward": false, "takes": ["S(0)", "R"], "makes": ["S(0)"]},
     …]}

A layout has a word for each axis of the mesh: R, S(dim), or P, which is P(op) if it is no sum. Null is any layout, or
no tensor.
"""

import json
import re
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from ...errors import PlacementError
from ...layout.placements import REDUCE_OPS
from ...rules import State
from ..search.tape import BORDER, Op
from .recording import Recording

NAME = "decisions.json"
_WORD = re.compile(r"R|S\((\d+)\)|P(?:\((\w+)\))?")

Sides = tuple[tuple[State | None, ...], tuple[State | None, ...]]
"""The states in which an operator takes its operands, and makes its results."""


class Refused(PlacementError):
    """A file does not hold decisions, or holds some that cannot be."""


def operators(recording: Recording) -> list[Op]:
    """The operators of a program whose layouts are decided."""
    return [op for op in recording.tape.ops if op.func != BORDER]


def program(recording: Recording) -> str:
    """What identifies a program: its mesh, its operators and their sizes, and where it says that tensors are."""
    lines = [repr((recording.mesh.mesh_dim_names, tuple(recording.mesh.shape)))]
    for op in recording.tape.ops:
        values = [v and (v.shape, v.dtype, recording.fixed.get(v)) for v in (*op.operands, *op.outputs)]
        lines.append(repr((str(op.func), op.path, op.backward, values)))
    return sha256("\n".join(lines).encode()).hexdigest()[:16]


def text(recording: Recording, sides: Sequence[Sides], seconds: float, bound: float) -> str:
    """Decisions as the content of a file."""
    rows = [
        json.dumps(
            {
                "operator": str(op.func),
                "module": op.path,
                "backward": op.backward,
                "takes": [_word(s) for s in takes],
                "makes": [_word(s) for s in makes],
            }
        )
        for op, (takes, makes) in zip(operators(recording), sides, strict=True)
    ]
    mesh = recording.mesh
    names = mesh.mesh_dim_names or [str(axis) for axis in range(mesh.ndim)]
    head = {"program": program(recording), "mesh": dict(zip(names, mesh.shape)), "seconds": seconds, "bound": bound}
    return f'{json.dumps(head)[:-1]}, "operators": [\n ' + ",\n ".join(rows) + "]}\n"


def read(folder: Path, recording: Recording) -> tuple[list[Sides], float, float] | None:
    """What the files in a folder, and in folders in it, say of a program; None if there is nothing about it.

    Returns:
        The sides of each of its operators, the seconds of a step, and the bound on them.

    Raises:
        Refused: a file cannot be read, or what it says of an operator is no layout.
    """
    wanted = program(recording)
    for path in _files(folder):
        try:
            said = json.loads(path.read_text())
            if said["program"] != wanted:
                continue
            rows = said["operators"]
            if [row["operator"] for row in rows] != [str(op.func) for op in operators(recording)]:
                raise Refused(f"{path} has other operators than the program; change nothing but takes and makes")
            sides = [
                (
                    tuple([_state(path, k, row, w) for w in row["takes"]]),
                    tuple([_state(path, k, row, w) for w in row["makes"]]),
                )
                for k, row in enumerate(rows)
            ]
            return sides, float(said["seconds"]), float(said["bound"])
        except (ValueError, KeyError, TypeError) as error:
            raise Refused(f"{path} does not hold decisions as a dump writes them: {error!r}") from None
    return None


def digest(folder: str) -> str:
    """What stands in the files of a folder, for cache keys."""
    return sha256(b"\0".join([path.read_bytes() for path in _files(Path(folder))])).hexdigest()


def _files(folder: Path) -> list[Path]:
    return sorted(folder.rglob(NAME))


def refused(folder: str, k: int, op: Op, sides: Sides, allowed: Sequence[Sides]) -> Refused:
    """The error for layouts that no rule of an operator allows."""

    def words(sides: Sides) -> str:
        takes, makes = ([_word(s) or "any" for s in side] for side in sides)
        return f"{', '.join(takes)} -> {', '.join(makes)}"

    listed = "; ".join(sorted({words(s) for s in allowed})[:8])
    return Refused(
        f"the decisions in {folder} have operator {k}, {op.func} in {op.path or 'the model'}, run {words(sides)}, "
        f"which its rule does not allow; it allows {listed}"
    )


@cache
def _word(state: State | None) -> str | None:
    if state is None:
        return None
    words = ["R" if s is None else f"S({s})" if isinstance(s, int) else "P" if s == "sum" else f"P({s})" for s in state]
    return " ".join(words)


def _state(path: Path, k: int, row: Any, word: str | None) -> State | None:
    if word is None:
        return None
    found: list[int | str | None] = []
    for part in word.split():
        m = _WORD.fullmatch(part)
        if m is None or (m[2] and m[2] not in REDUCE_OPS):
            raise Refused(
                f"{path} has {word!r} for operator {k}, {row['operator']}; write for each axis of the mesh R, S(dim), "
                "P or P(op)"
            )
        found.append(int(m[1]) if m[1] else None if part == "R" else m[2] or "sum")
    return tuple(found)


__all__ = ["NAME", "Sides", "digest", "operators", "program", "read", "refused", "text"]
