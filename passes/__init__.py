"""The algebra of redistribution, as passes that rewrite the FX graphs AOTAutograd traced.

A graph holds local aten operators and the redistribution operators `torch.ops.dtensor.*`. `run` raises functional
collectives to redistribution operators, simplifies the graph to a fixpoint, lowers what is left to start/wait pairs,
and verifies the graph after each pass that changed it. Passes have no side effects: they create no process groups and
read no files. No decision depends on anything that differs between ranks.
"""

if not __name__.startswith("dtensor."):
    raise ImportError(f"the folder passes/ was imported as {__name__!r}; write: import dtensor.passes")

from .algebra.add_before_reduce import AddBeforeReduce
from .algebra.cancel_gather_shard import CancelGatherShard
from .algebra.common_subexpressions import CommonSubexpressions
from .algebra.compute_before_gather import ComputeBeforeGather
from .algebra.dead_code import DeadCode
from .algebra.fuse_all_reduce import FuseAllReduce
from .algebra.fuse_reduce_scatter import FuseReduceScatter
from .algebra.localize_replicated import LocalizeReplicated
from .algebra.merge_axes import MergeAxes
from .algebra.narrow_collectives import NarrowCollectives
from .algebra.reduce_after_scale import ReduceAfterScale
from .algebra.reduce_after_view import ReduceAfterView
from .algebra.reuse_gather import ReuseGather
from .algebra.scatter_before_reduce import ScatterBeforeReduce
from .algebra.shard_before_collective import ShardBeforeCollective
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
    "AddBeforeReduce",
    "Bucket",
    "CancelGatherShard",
    "Collective",
    "CollectiveInfo",
    "CommonSubexpressions",
    "ComputeBeforeGather",
    "DeadCode",
    "FuseAllReduce",
    "FuseReduceScatter",
    "LocalizeReplicated",
    "Lower",
    "MergeAxes",
    "MeshGroups",
    "NarrowCollectives",
    "Pass",
    "PassRecord",
    "Raise",
    "ReduceAfterScale",
    "ReduceAfterView",
    "Regather",
    "ReuseGather",
    "ScatterBeforeReduce",
    "Schedule",
    "ShardBeforeCollective",
    "Simulation",
    "SplitBatch",
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
