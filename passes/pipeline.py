"""The pipeline: the order of compilation, from the joint graph to what runs. This table is all of it.

A program that is differentiated is first one joint graph, then the same with its parameters marked, and torch's
partitioner makes a forward and a backward of it; one that is not is an inference graph. On each of these the rows of
`STAGES` that name it run in the order in which they stand here (`dtensor.compile.backends.run_passes`), and then
Inductor or torch takes the graph. Whatever changes a graph is a pass in a row.
"""

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
from .borders.agree import Agree
from .borders.copy_written import CopyWritten
from .borders.keep_order import KeepOrder
from .borders.pin import Pin
from .borders.record import Record
from .functional.expand import Expand
from .functional.lower import Lower
from .functional.raise_ import Raise
from .overlap.beside import Beside
from .overlap.bucket import Bucket
from .overlap.recompute import Recompute
from .overlap.regather import Regather
from .overlap.schedule import Schedule
from .overlap.split_batch import SplitBatch
from .stages import HALVES, INFERENCE, JOINT, MARKED, Pass, Stage

PREPARE: tuple[Pass, ...] = (Raise(),)
"""Passes that bring a graph into the form the other passes read."""

SIMPLIFY: tuple[Pass, ...] = (
    # First remove duplicate and unused nodes: the passes below count users.
    CommonSubexpressions(),
    DeadCode(),
    # A collective that becomes local needs neither merging nor moving.
    LocalizeReplicated(),
    # A gather that cancels leaves reductions next to each other.
    CancelGatherShard(),
    # After cancel_gather_shard, which does not look through casts. Before fuse_all_reduce, which would leave the cast
    # next to a reduction, where it cannot move.
    NarrowCollectives(),
    # Before fuse_all_reduce: gathers of reduce_scatters whose results are combined become one gather, not two
    # all_reduces.
    ComputeBeforeGather(),
    # After compute_before_gather, which leaves a gather with two users where it is.
    ReuseGather(),
    # A shard moves above collectives over other axes, up to the collective it can merge with; this also brings
    # reductions next to each other.
    ShardBeforeCollective(),
    # Moves reductions next to each other for the next passes to merge.
    ReduceAfterView(),
    # After reduce_after_view, which is bitwise and suffices where nothing is scaled.
    ReduceAfterScale(),
    # Before fuse_reduce_scatter: a sum of all_reduces that is then sharded becomes one reduce_scatter, not two
    # reduce_scatters and a sum.
    AddBeforeReduce(),
    FuseReduceScatter(),
    # Complements fuse_reduce_scatter: there the shard is over the reduction's whole group, here over some of its axes.
    ScatterBeforeReduce(),
    # After add_before_reduce, which has merged the reduce_scatters whose sum is gathered.
    FuseAllReduce(),
    # Last: while a collective is over one axis, a pass above may still shrink or cancel it, which saves more than
    # merging it with another.
    MergeAxes(),
)
"""The algebra. These passes run in rounds until none of them changes the graph, before any collective is
asynchronous."""

STAGES: tuple[Stage, ...] = (
    Stage(
        "raise",
        (JOINT, *HALVES),
        PREPARE,
        why="before everything else, as the simplifying passes read redistribution operators only",
    ),
    Stage(
        "simplify",
        (JOINT, *HALVES),
        SIMPLIFY,
        why="before the partition, so that what to save for the backward is decided on the collectives that remain, "
        "and after it, as each half has values that only the other one needed",
        fixpoint=True,
    ),
    Stage(
        "divide",
        (MARKED, INFERENCE),
        (
            # First: what it inserts is a part of the batch or of the forward like anything else.
            CopyWritten(),
            # Before regather, which then marks gathers as they will run.
            SplitBatch(),
            # Marks nodes for the partitioner and changes nothing else.
            Regather(),
            # Last: does for a whole step, which is one graph, what the partitioner does for two.
            Recompute(),
        ),
        why="once it is known which inputs are parameters, and after whatever shrinks or merges collectives",
    ),
    Stage(
        "overlap",
        HALVES,
        (
            # Turns collectives into start/wait pairs, which no pass above reads.
            Lower(),
            # Before schedule: collectives that share a buffer start together.
            Bucket(),
            # After these: no pass may change the order that it chose.
            Schedule(),
            # But for what is none of the model's, and goes behind.
            Beside(),
            # After these, to which what it takes apart is one node.
            Expand(),
        ),
        why="when nothing can be saved any more, what is left is sent while something is computed",
    ),
    Stage(
        "borders",
        HALVES,
        (
            # Right after these: it keeps their order.
            Pin(),
            # Before keep_order, so that the first collective waits for the agreement.
            Agree(),
            KeepOrder(),
        ),
        why="after all passes that reorder, as these fix the order of collectives",
        open=False,
    ),
    Stage(
        "record",
        HALVES,
        (Record(),),
        why="at the very end, so that the other passes see the same graph with and without",
        open=False,
    ),
)
"""What runs on which graph, in order, with the reason for its place."""

_ordered = (*PREPARE, *SIMPLIFY, *[p for stage in STAGES for p in stage.passes])

REGISTERED: tuple[Pass, ...] = tuple({p.name: p for p in _ordered}.values())
"""All passes of this library, each once."""

PIPELINE: tuple[Pass, ...] = tuple([p for p in REGISTERED if not p.when])
"""The passes that run unless options say otherwise, in the order in which `run` runs them."""

__all__ = [
    "PIPELINE",
    "PREPARE",
    "REGISTERED",
    "SIMPLIFY",
    "STAGES",
    "AddBeforeReduce",
    "Agree",
    "Beside",
    "Bucket",
    "CancelGatherShard",
    "CommonSubexpressions",
    "ComputeBeforeGather",
    "CopyWritten",
    "DeadCode",
    "Expand",
    "FuseAllReduce",
    "FuseReduceScatter",
    "KeepOrder",
    "LocalizeReplicated",
    "Lower",
    "MergeAxes",
    "NarrowCollectives",
    "Pin",
    "Raise",
    "Recompute",
    "Record",
    "ReduceAfterScale",
    "ReduceAfterView",
    "Regather",
    "ReuseGather",
    "ScatterBeforeReduce",
    "Schedule",
    "ShardBeforeCollective",
    "SplitBatch",
]
