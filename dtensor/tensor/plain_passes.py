"""The passes of this library in plain `torch.compile`: what stands in Inductor's options for custom passes.

It only forwards to `dtensor.compile`, which is imported on the first compilation, with options from the environment
(`dtensor.program.environment`). `DTENSOR_PASSES=0` or `uninstall` turns the passes off. To import this module
installs them; `compile_hooks` does so once torch imports Inductor's options.
"""

import importlib
from typing import Any

from ..mesh.provenance import keeps_specs
from ..program import environment
from ..torch_private.on_demand import custom_graph_pass, inductor_config
from ..torch_private.partitioning import min_cut_partition

STAGES = ("joint_custom_pre_pass", "post_grad_custom_pre_pass")
"""The custom pass options of Inductor that the passes of plain `torch.compile` are added to."""


INDUCTOR = "dtensor.compile.backends.inductor"
"""The module that has what runs in Inductor's places."""

PARTITIONER = "custom_partitioner_fn"
"""The Inductor option that holds the custom partitioner. It holds only one."""


class PlainPasses(custom_graph_pass.CustomInferenceAwareGraphPass):
    """Runs the passes of one stage with the environment's options. Graphs without dtensor operators are unchanged.

    Raises:
        ValueError: an environment variable holds an invalid value for its option.
    """

    def __init__(self, stage: str) -> None:
        self.stage = stage

    def __call__(self, graph: Any, is_inference: bool = False) -> None:
        if _has_ours(graph) and not environment.passes_are_off():
            options = importlib.import_module("dtensor.compile").Options.of_environment()
            run = importlib.import_module(INDUCTOR).STAGES[self.stage](options)
            run(graph, is_inference)
        elif keeps_specs() and self.stage == STAGES[1]:
            importlib.import_module(INDUCTOR).record_only(graph, is_inference)

    def uuid(self) -> Any:
        """The cache key; None disables the cache, so that every graph is available for a dump or a replay."""
        if environment.text("dump") or environment.text("verify") == "1" or environment.findings() or keeps_specs():
            return None
        return self.stage, environment.fingerprint(), importlib.import_module(INDUCTOR).trace_key()


class PlainPartition(custom_graph_pass.CustomPartitionerFn):
    """Partitions with the environment's options and delegates to the partitioner that was installed before.

    Graphs without dtensor operators go straight to that partitioner.
    """

    def __init__(self, then: custom_graph_pass.CustomPartitionerFn | None) -> None:
        self.then = then

    def __call__(self, gm: Any, joint_inputs: Any, **kwargs: Any) -> Any:
        if not _has_ours(gm.graph) or environment.passes_are_off():
            return (self.then or min_cut_partition)(gm, joint_inputs, **kwargs)
        options = importlib.import_module("dtensor.compile").Options.of_environment()
        return importlib.import_module(INDUCTOR).Partition(options, self.then)(gm, joint_inputs, **kwargs)

    def uuid(self) -> Any:
        key = importlib.import_module(INDUCTOR).trace_key()
        return environment.fingerprint(), key, self.then and self.then.uuid()


def _has_ours(graph: Any) -> bool:
    return any(getattr(node.target, "namespace", None) == "dtensor" for node in graph.nodes)


def others_partitioner() -> Any:
    """The custom partitioner that others configured in Inductor; None if it is torch's default."""
    found = getattr(inductor_config, PARTITIONER)
    return found.then if isinstance(found, PlainPartition) else found


def chained(stage: str, ours: Any) -> list[Any]:
    """The custom passes configured for a stage, without `PlainPasses` and with `ours`, if given, at the end."""
    found = getattr(inductor_config, stage)
    others = [] if found is None else list(found) if isinstance(found, (list, tuple)) else [found]
    return [p for p in others if not isinstance(p, PlainPasses)] + ([ours] if ours is not None else [])


def install() -> None:
    """Add the passes to plain `torch.compile`, after the passes that are already configured."""
    for stage in STAGES:
        setattr(inductor_config, stage, chained(stage, PlainPasses(stage)))
    setattr(inductor_config, PARTITIONER, PlainPartition(others_partitioner()))


def uninstall() -> None:
    """Remove the passes from plain `torch.compile`."""
    for stage in STAGES:
        setattr(inductor_config, stage, chained(stage, None) or None)
    setattr(inductor_config, PARTITIONER, others_partitioner())


install()

__all__ = ["PARTITIONER", "STAGES", "PlainPasses", "chained", "install", "others_partitioner", "uninstall"]
