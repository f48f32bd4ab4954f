"""Graph to graph: the algebra of redistribution, on FX graphs that AOTAutograd traced.

A graph holds local aten operators and the `torch.ops.dtensor` ones. `run` raises functional collectives to these,
simplifies to a fixpoint, lowers what is left to start/wait pairs, and checks every step. Nothing here touches the
world: no process group is created, no file read, and nothing is decided on what differs between ranks.
"""

if not __name__.startswith("dtensor."):
    raise ImportError(f"the folder passes/ was imported as {__name__!r}; write: import dtensor.passes")

from .alike import Alike
from .all_reduce import AllReduce
from .bucket import Bucket
from .common_subexpressions import CommonSubexpressions
from .compare import Simulation, equivalent
from .count import CollectiveInfo, collectives, count, wire_bytes
from .dead_code import DeadCode
from .gather_later import GatherLater
from .gather_once import GatherOnce
from .gather_shard import GatherShard
from .groups import MeshGroups
from .ir import Collective
from .lower import Lower
from .merge_groups import MergeGroups
from .narrow_moves import NarrowMoves
from .pipeline import EXACTNESS, PIPELINE, PREPARE, SIMPLIFY, Pass, PassRecord, run, select
from .raise_ import Raise
from .reduce_scatter import ReduceScatter
from .regather import Regather
from .scale import Scale
from .scatter_part import ScatterPart
from .schedule import Schedule
from .shard_first import ShardFirst
from .simulate import mesh_groups, simulate
from .sink import Sink
from .split_batch import SplitBatch
from .sum_of_all_reduces import SumOfAllReduces
from .text import text
from .verify import verify

__all__ = [
    "EXACTNESS",
    "PIPELINE",
    "PREPARE",
    "SIMPLIFY",
    "Alike",
    "AllReduce",
    "Bucket",
    "Collective",
    "CollectiveInfo",
    "CommonSubexpressions",
    "DeadCode",
    "GatherLater",
    "GatherOnce",
    "GatherShard",
    "Lower",
    "MergeGroups",
    "MeshGroups",
    "NarrowMoves",
    "Pass",
    "PassRecord",
    "Raise",
    "ReduceScatter",
    "Regather",
    "Scale",
    "ScatterPart",
    "Schedule",
    "ShardFirst",
    "Simulation",
    "Sink",
    "SplitBatch",
    "SumOfAllReduces",
    "collectives",
    "count",
    "equivalent",
    "mesh_groups",
    "run",
    "select",
    "simulate",
    "text",
    "verify",
    "wire_bytes",
]
