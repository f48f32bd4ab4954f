"""Graph to graph: the algebra of redistribution, on FX graphs that AOTAutograd traced.

A graph holds local aten operators and the `torch.ops.dtensor` ones. `run` raises functional collectives to these,
simplifies to a fixpoint, lowers what is left to start/wait pairs, and checks every step. Nothing here touches the
world: no process group is created, no file read, and nothing is decided on what differs between ranks.
"""

if not __name__.startswith("dtensor."):
    raise ImportError(f"the folder passes/ was imported as {__name__!r}; write: import dtensor.passes")

from .algebra.all_reduce_to_reduce_scatter import ReduceScatter
from .algebra.cancel_gather_shard import GatherShard
from .algebra.common_subexpressions import CommonSubexpressions
from .algebra.compute_before_gather import GatherLater
from .algebra.dead_code import DeadCode
from .algebra.localize_replicated import Alike
from .algebra.merge_axes import MergeGroups
from .algebra.narrow_collectives import NarrowMoves
from .algebra.reduce_scatter_to_all_reduce import AllReduce
from .algebra.reuse_gather import GatherOnce
from .algebra.scatter_first import ScatterPart
from .algebra.shard_before_collective import ShardFirst
from .algebra.sink_below_scales import Scale
from .algebra.sink_below_views import Sink
from .algebra.sum_before_reducing import SumOfAllReduces
from .functional.lower import Lower
from .functional.raise_ import Raise
from .graph.compare import Simulation, equivalent
from .graph.count import CollectiveInfo, collectives, count, wire_bytes
from .graph.groups import MeshGroups
from .graph.ir import Collective
from .graph.simulate import mesh_groups, simulate
from .graph.text import text
from .graph.verify import verify
from .overlap.bucket import Bucket
from .overlap.regather import Regather
from .overlap.schedule import Schedule
from .overlap.split_batch import SplitBatch
from .pipeline import EXACTNESS, PIPELINE, PREPARE, SIMPLIFY, Pass, PassRecord, run, select

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
