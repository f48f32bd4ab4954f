"""The algebra of redistribution, as passes that rewrite the FX graphs AOTAutograd traced.

A graph holds local aten operators and the redistribution operators `torch.ops.dtensor.*`. `run` raises functional
collectives to redistribution operators, simplifies the graph to a fixpoint, lowers what is left to start/wait pairs,
and verifies the graph after each pass that changed it. `pipeline` is the table of all of them, with the stages of a
compilation. Passes have no side effects: they create no process groups and read no files. No decision depends on
anything that differs between ranks.
"""

if not __name__.startswith("dtensor."):
    raise ImportError(f"the folder passes/ was imported as {__name__!r}; write: import dtensor.passes")

from . import pipeline
from .graph.compare import Simulation, equivalent
from .graph.count import CollectiveInfo, collectives, count, wire_bytes
from .graph.groups import MeshGroups
from .graph.ir import Collective, collective, insert, replace
from .graph.simulate import mesh_groups, simulate
from .graph.text import text
from .graph.verify import verify
from .pipeline import *  # noqa: F403  (the table, and each pass)
from .runner import PassRecord, run, select
from .stages import EXACTNESS, Compilation, Pass, Stage

__all__ = [
    "EXACTNESS",
    "Collective",
    "CollectiveInfo",
    "Compilation",
    "MeshGroups",
    "Pass",
    "PassRecord",
    "Simulation",
    "Stage",
    "collective",
    "collectives",
    "count",
    "equivalent",
    "insert",
    "mesh_groups",
    "replace",
    "run",
    "select",
    "simulate",
    "text",
    "verify",
    "wire_bytes",
]
__all__ += pipeline.__all__
