"""The passes inside Inductor: on the joint graph before its own passes, and on each graph before its post-grad ones."""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import fx

import dtensor
from dtensor.comm.replication_check import noted
from dtensor.comm.start_collectives import OVER_GLOO
from dtensor.dispatch import registration, strictness
from dtensor.mesh.local_sizes import local_lengths
from dtensor.torch_private.compiling import (
    CustomInferenceAwareGraphPass,
    CustomPartitionerFn,
    check_results,
    get_hash_for_files,
    is_within,
    lower_as_collective,
    min_cut_partition,
    sizes_defined_by,
)
from dtensor.torch_private.core import process_groups

from ..estimates.meshes import mesh_groups
from .options import Options
from .run_passes import optimise, prepare_partition, simplify_joint


class JointPasses(CustomInferenceAwareGraphPass):
    """The simplifying passes on the joint graph, with given options."""

    def __init__(self, options: Options) -> None:
        self.options = options

    def __call__(self, graph: fx.Graph, is_inference: bool = False) -> None:
        simplify_joint(graph, self.options, within=is_within())

    def uuid(self) -> Any:
        """None, so that nothing is taken from a cache, where the options ask for it."""
        return (trace_key(), repr(self.options)) if self.options.cacheable else None


class Passes(JointPasses):
    """The whole pipeline on a forward, backward or inference graph, with given options."""

    def __call__(self, graph: fx.Graph, is_inference: bool = False) -> None:
        lower_as_collective(OVER_GLOO.all_to_all)
        sizes_defined_by(torch.ops.dtensor.local_length.default, local_lengths)
        optimise(graph, self.options, inference=is_inference, within=is_within())


class Partition(CustomPartitionerFn):
    """The partition of the joint graph: some gathers are marked to be done again, then `then` divides it, or torch."""

    def __init__(self, options: Options, then: CustomPartitionerFn | None = None) -> None:
        self.options: Options = options
        self.then: CustomPartitionerFn | None = then

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        check_results(gm.graph, kwargs["num_fwd_outputs"])
        prepare_partition(gm.graph, self.options, kwargs.get("static_lifetime_input_indices") or ())
        return (self.then or min_cut_partition)(gm, joint_inputs, **kwargs)

    def uuid(self) -> Any:
        return trace_key(), repr(self.options), self.then and self.then.uuid()


STAGES: dict[str, Any] = {"joint_custom_pre_pass": JointPasses, "post_grad_custom_pre_pass": Passes}
"""Where Inductor takes custom passes -> the pass that runs there."""


def trace_key() -> Any:
    """What compiled code depends on beside the program: the library's source, users' rules, strict mode, the ranks.

    Part of the keys under which torch keeps compiled code, from one process to the next: another rule makes another
    graph of the same program, what strict mode refuses must not be found ready made, and a graph names its process
    groups without saying which ranks they are, of which others they are the product, which of uneven shards this rank
    has, nor whether ranks compare its inputs.
    """
    meshes = [(m.names, m.network.sizes, m.network.links) for m in mesh_groups()]
    return source_hash(), registration.fingerprint(), strictness.fingerprint(), process_groups(), meshes, noted()


@cache
def source_hash() -> bytes:
    """Hash of the library's source: compiled code that Inductor keeps is stale when the passes change."""
    root = Path(dtensor.__file__).parent
    files = {str(p) for part in ("", "compile", "passes") for p in (root / part).rglob("*.py")}  # two may be links
    return get_hash_for_files(tuple(sorted(files)))


__all__ = ["STAGES", "JointPasses", "Passes", "source_hash", "trace_key"]
