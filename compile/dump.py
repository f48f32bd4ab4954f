"""Writing graphs down, as text, while they are compiled: what the option `dump` asks for.

    folder/rank0/000_forward_00_input.txt             the graph as it came to the passes
    folder/rank0/000_forward_03_reduce_scatter.txt    after the third change, which the pass of that name made

The first number counts what was compiled: the joint graph, the forward and the backward of one trace share it. Nothing
is overwritten: counting goes on after what the folder holds. A graph that a pass left invalid is written before that
is said. Groups print by the names of their mesh axes, as far as these tell them apart.
"""

import re
from collections.abc import Callable
from pathlib import Path
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import fx

from dtensor._torch import current_trace
from dtensor.mesh import known_meshes
from dtensor.passes import text

NUMBERED = re.compile(r"(\d+)_(joint|forward|backward|inference)_\d+_\w+\.txt")

_numbers: WeakKeyDictionary[object, dict[Path, int]] = WeakKeyDictionary()


def observer(folder: str, direction: str) -> Callable[[int, str, fx.Graph], None]:
    """What `passes.run(observe=...)` calls to write the stages of one graph under `folder`; makes the folder."""
    own = Path(folder) / f"rank{dist.get_rank() if dist.is_initialized() else 0}"
    own.mkdir(parents=True, exist_ok=True)
    stem, named = f"{_number(own):03}_{direction}", labels()

    def observe(stage: int, name: str, graph: fx.Graph) -> None:
        (own / f"{stem}_{stage:02}_{name}.txt").write_text(text(graph, named) + "\n")

    return observe


def _number(own: Path) -> int:
    """The number of what is being compiled: the same for all graphs of one trace."""
    trace = current_trace()
    known = _numbers.setdefault(trace, {}) if trace is not None else {}
    if own not in known:
        taken = [int(m[1]) for path in own.iterdir() if (m := NUMBERED.fullmatch(path.name))]
        known[own] = max(taken, default=-1) + 1
    return known[own]


def labels() -> dict[str, str]:
    """Names of process groups -> the mesh axes they are over, as far as no two would be called alike."""
    found: dict[str, str] = {}
    for facts in known_meshes():
        dims = facts.mesh.mesh_dim_names
        for axes, name in facts.groups.items() if dims else ():
            found.setdefault(name, ",".join([dims[a] for a in axes]))
    called = list(found.values())
    return {name: label for name, label in found.items() if called.count(label) == 1}


__all__ = ["labels", "observer"]
