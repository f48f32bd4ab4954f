"""What `import dtensor` leaves in torch.compile: the backend's name, and the passes in their places in Inductor.

Both only forward to `dtensor.compile`, which is imported when something is compiled. `DTENSOR_PASSES=0` in the
environment, or `dtensor.hooks.uninstall()`, switches the passes of plain `torch.compile` off.
"""

import importlib
import os
from typing import Any

from ._torch import CustomGraphPass, CustomPartitionerFn, inductor_config, register_backend

ENVIRONMENT = "DTENSOR_PASSES"
STAGES = ("joint_custom_pre_pass", "post_grad_custom_pre_pass")
"""The lists of Inductor's that the passes of plain `torch.compile` are in."""


PARTITIONER = "custom_partitioner_fn"
"""Inductor's name for the partitioner, of which there is one."""


class PlainPasses(CustomGraphPass):
    """The passes of one stage with default options; leaves alone others' collectives and graphs without ours."""

    def __init__(self, stage: str):
        self.stage = stage

    def __call__(self, graph: Any) -> None:
        if _has_ours(graph):
            compile_ = importlib.import_module("dtensor.compile")
            compile_.STAGES[self.stage](compile_.Options(disable=("raise",)))(graph)

    def uuid(self) -> Any:
        return self.stage, importlib.import_module("dtensor.compile").trace_key()


class PlainPartition(CustomPartitionerFn):
    """The partition with default options, then by whoever partitioned before."""

    def __init__(self, then: CustomPartitionerFn | None):
        self.then = then

    def __call__(self, gm: Any, joint_inputs: Any, **kwargs: Any) -> Any:
        compile_ = importlib.import_module("dtensor.compile")
        disable = ("raise",) if _has_ours(gm.graph) else ("raise", "regather")
        return compile_.Partition(compile_.Options(disable=disable), self.then)(gm, joint_inputs, **kwargs)

    def uuid(self) -> Any:
        return importlib.import_module("dtensor.compile").trace_key(), self.then and self.then.uuid()


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
    if os.environ.get(ENVIRONMENT) != "0":
        for stage in STAGES:
            setattr(inductor_config, stage, chained(stage, PlainPasses(stage)))
        setattr(inductor_config, PARTITIONER, PlainPartition(others_partitioner()))


def uninstall() -> None:
    """Take the passes out of plain `torch.compile` again."""
    for stage in STAGES:
        setattr(inductor_config, stage, chained(stage, None) or None)
    setattr(inductor_config, PARTITIONER, others_partitioner())


def backend(gm: Any, example_inputs: Any, **kwargs: Any) -> Any:
    """The backend `"dtensor"` of torch.compile; see `dtensor.compile.backend`."""
    return importlib.import_module("dtensor.compile").backend(gm, example_inputs, **kwargs)


register_backend(backend, name="dtensor")
install()

__all__ = ["ENVIRONMENT", "STAGES", "PlainPasses", "backend", "chained", "install", "uninstall"]
