"""What `import dtensor` leaves in torch.compile: the backend's name, and the passes in their places in Inductor.

Both only forward to `dtensor.compile`, which is imported when something is compiled. The options of plain
`torch.compile` come from the environment (`dtensor.mesh.environment`); `DTENSOR_PASSES=0` there, or
`dtensor.hooks.uninstall()`, switches its passes off.
"""

import importlib
from contextlib import ExitStack
from typing import Any

from ..mesh import environment
from ..torch_private.compiling import (
    CustomInferenceAwareGraphPass,
    CustomPartitionerFn,
    inductor_config,
    min_cut_partition,
    register_backend,
)

STAGES = ("joint_custom_pre_pass", "post_grad_custom_pre_pass")
"""The lists of Inductor's that the passes of plain `torch.compile` are in."""


INDUCTOR = "dtensor.compile.backends.inductor"
"""The module that has what runs in Inductor's places."""

PARTITIONER = "custom_partitioner_fn"
"""Inductor's name for the partitioner, of which there is one."""


_forever = ExitStack()


class PlainPasses(CustomInferenceAwareGraphPass):
    """The passes of one stage with the environment's options; leaves alone graphs without our operators.

    Raises:
        ValueError: an environment variable holds what its option cannot be.
    """

    def __init__(self, stage: str) -> None:
        self.stage = stage

    def __call__(self, graph: Any, is_inference: bool = False) -> None:
        if _has_ours(graph) and not environment.passes_are_off():
            options = importlib.import_module("dtensor.compile").Options.of_environment()
            run = importlib.import_module(INDUCTOR).STAGES[self.stage](options)
            run(graph, is_inference)

    def uuid(self) -> Any:
        """None, so that nothing is taken from a cache, where graphs are to be written down or replayed."""
        if environment.text("dump") or environment.text("verify") == "1":
            return None
        return self.stage, environment.fingerprint(), importlib.import_module(INDUCTOR).trace_key()


class PlainPartition(CustomPartitionerFn):
    """The partition with default options, then by whoever partitioned before."""

    def __init__(self, then: CustomPartitionerFn | None) -> None:
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
    """The partitioner that is in Inductor's configuration, apart from ours; None for torch's."""
    found = getattr(inductor_config, PARTITIONER)
    return found.then if isinstance(found, PlainPartition) else found


def chained(stage: str, ours: Any) -> list[Any]:
    """Inductor's custom passes of a stage as they are, with `ours` in the place of the plain ones, at the end."""
    found = getattr(inductor_config, stage)
    others = [] if found is None else list(found) if isinstance(found, (list, tuple)) else [found]
    return [p for p in others if not isinstance(p, PlainPasses)] + ([ours] if ours is not None else [])


def install() -> None:
    """Add the passes to plain `torch.compile`, after whatever passes are there already."""
    for stage in STAGES:
        setattr(inductor_config, stage, chained(stage, PlainPasses(stage)))
    setattr(inductor_config, PARTITIONER, PlainPartition(others_partitioner()))


def dump_from_now_on() -> None:
    """Dump all that is compiled in this process, if the environment asks for it."""
    folder = environment.text("dump")
    if folder:
        _forever.enter_context(importlib.import_module("dtensor.compile").dump(folder))


def uninstall() -> None:
    """Take the passes out of plain `torch.compile` again."""
    for stage in STAGES:
        setattr(inductor_config, stage, chained(stage, None) or None)
    setattr(inductor_config, PARTITIONER, others_partitioner())


def backend(gm: Any, example_inputs: Any, **kwargs: Any) -> Any:
    """The backend `"dtensor"` of torch.compile; see `dtensor.compile.backend`."""
    return importlib.import_module("dtensor.compile").backend(gm, example_inputs, **kwargs)


register_backend(backend, "dtensor")
install()

__all__ = ["PARTITIONER", "STAGES", "PlainPasses", "backend", "chained", "dump_from_now_on", "install", "uninstall"]
