"""The passes inside Inductor: on the joint graph before Inductor's passes, and on each graph before its post-grad
passes."""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import fx

import dtensor.passes
from dtensor.comm.replication_check import drawn, noted
from dtensor.comm.start_collectives import OVER_GLOO, permute
from dtensor.dispatch import registration, strictness
from dtensor.mesh.local_sizes import local_lengths
from dtensor.mesh.mesh import is_for_any_rank
from dtensor.mesh.provenance import AGAIN, keeps_specs
from dtensor.parallel.decisions.deciding import fingerprint as decided_by
from dtensor.passes.graph import ir, sizes
from dtensor.torch_private.compiling import (
    CustomInferenceAwareGraphPass,
    CustomPartitionerFn,
    check_results,
    get_hash_for_files,
    is_within,
    lower_as_collective,
    sizes_defined_by,
)
from dtensor.torch_private.core import process_groups
from dtensor.torch_private.kernels.libraries import rebuild_damaged
from dtensor.torch_private.partitioning import all_symbols_saved, min_cut_partition
from dtensor.torch_private.peak_memory import current_bound, estimate_memory_as_generated, keep_apart

from ..estimates.meshes import mesh_groups, mesh_kinds
from .alternatives import price_alternatives
from .options import Options
from .run_passes import direction, optimise, partitioned, run_anywhere, simplify_joint


class JointPasses(CustomInferenceAwareGraphPass):
    """The simplifying passes with given options, on the joint graph."""

    def __init__(self, options: Options) -> None:
        self.options = options

    def __call__(self, graph: fx.Graph, is_inference: bool = False) -> None:
        simplify_joint(graph, self.options, within=is_within())

    def uuid(self) -> Any:
        """The cache key; None if the options require that nothing is taken from a cache."""
        cacheable = self.options.cacheable and not keeps_specs()
        return (trace_key(), self.options.fingerprint()) if cacheable else None


class Passes(JointPasses):
    """All passes with given options, on a forward, backward or inference graph."""

    def __call__(self, graph: fx.Graph, is_inference: bool = False) -> None:
        for start in (OVER_GLOO.all_to_all, permute):
            lower_as_collective(start)
        sizes_defined_by(torch.ops.dtensor.local_length.default, local_lengths)
        estimate_memory_as_generated()
        keep_apart(_computes_again, _computes_early)
        bound = current_bound()
        if bound is not None and not is_within():
            bound.given = sum([sizes.nbytes(x) for x in graph.find_nodes(op="placeholder")])
        optimise(graph, self.options, inference=is_inference, within=is_within())


def _computes_again(node: fx.Node) -> bool:
    """Whether a whole step computes there what it has computed early; in one kernel with that it would be held."""
    return AGAIN in node.meta


def _computes_early(node: fx.Node) -> bool:
    return AGAIN not in node.meta and not ir.in_backward(node)


def record_only(graph: fx.Graph, is_inference: bool) -> None:
    """Let a recorder have its part of a graph on which no other passes run."""
    run_anywhere(graph, direction(graph, is_inference), within=is_within())


class Partition(CustomPartitionerFn):
    """The partitioner of the joint graph: marks gathers to be recomputed, then calls `then` or torch's min-cut
    partitioner."""

    def __init__(self, options: Options, then: CustomPartitionerFn | None = None) -> None:
        self.options: Options = options
        self.then: CustomPartitionerFn | None = then

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        check_results(gm.graph, kwargs["num_fwd_outputs"])
        partition = self.then or min_cut_partition
        with all_symbols_saved():
            price_alternatives(gm, joint_inputs, self.options, partition, **kwargs)
            return partitioned(gm, joint_inputs, self.options, partition, **kwargs)

    def uuid(self) -> Any:
        return trace_key(), self.options.fingerprint(), self.then and self.then.uuid()


rebuild_damaged()

STAGES: dict[str, Any] = {"joint_custom_pre_pass": JointPasses, "post_grad_custom_pre_pass": Passes}
"""Inductor's option for a custom pass -> the pass that runs there."""


def trace_key() -> Any:
    """Return what compiled code depends on apart from the program: the library's source, users' rules, strict mode, the
    ranks.

    It is part of the keys under which torch caches compiled code across processes. Another rule makes another graph of
    the same program, and strict mode must not find ready-made code for what it refuses. A graph names its process
    groups, but the names do not determine which ranks the groups hold, of which other groups they are the product,
    which of the uneven shards this rank has, or whether the ranks compare the graph's inputs. Where ranks exchange
    compiled code, the meshes stand in place of what this rank is in them.
    """
    meshes = [(m.names, m.network.sizes, m.network.links) for m in mesh_groups()]
    groups = mesh_kinds() if is_for_any_rank() else process_groups()
    return (
        source_hash(),
        registration.fingerprint(),
        strictness.fingerprint(),
        groups,
        meshes,
        noted(),
        drawn(),
        decided_by(),
    )


@cache
def source_hash() -> bytes:
    """Return a hash of the library's source: code that Inductor cached is stale when the passes change."""
    packages = (dtensor.compile, dtensor.passes, dtensor)  # in a checkout the first two lie beside the third, not in it
    files = [str(p) for package in packages for p in sorted(Path(package.__path__[0]).rglob("*.py"))]
    return get_hash_for_files(tuple(dict.fromkeys(files)))


__all__ = ["STAGES", "JointPasses", "Passes", "source_hash", "trace_key"]
