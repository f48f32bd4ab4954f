"""What `import dtensor` leaves in torch.compile: the backend's name, and the passes in Inductor's lists of passes.

Both only forward to `dtensor.compile`, which is imported when something is compiled. `DTENSOR_PASSES=0` in the
environment, or `dtensor.hooks.uninstall()`, switches the passes of plain `torch.compile` off.
"""

import importlib
import os
from typing import Any

from ._torch import CustomGraphPass, inductor_config, register_backend

ENVIRONMENT = "DTENSOR_PASSES"
STAGES = ("joint_custom_pre_pass", "post_grad_custom_pre_pass")
"""The lists of Inductor's that the passes of plain `torch.compile` are in."""


class PlainPasses(CustomGraphPass):
    """The passes of one stage with default options; leaves alone others' collectives and graphs without ours."""

    def __init__(self, stage: str):
        self.stage = stage

    def __call__(self, graph: Any) -> None:
        if any(getattr(node.target, "namespace", None) == "dtensor" for node in graph.nodes):
            compile_ = importlib.import_module("dtensor.compile")
            compile_.STAGES[self.stage](compile_.Options(disable=("raise",)))(graph)

    def uuid(self) -> Any:
        return self.stage, importlib.import_module("dtensor.compile").trace_key()


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


def uninstall() -> None:
    """Take the passes out of plain `torch.compile` again."""
    for stage in STAGES:
        setattr(inductor_config, stage, chained(stage, None) or None)


def backend(gm: Any, example_inputs: Any, **kwargs: Any) -> Any:
    """The backend `"dtensor"` of torch.compile; see `dtensor.compile.backend`."""
    return importlib.import_module("dtensor.compile").backend(gm, example_inputs, **kwargs)


register_backend(backend, name="dtensor")
install()

__all__ = ["ENVIRONMENT", "STAGES", "PlainPasses", "backend", "chained", "install", "uninstall"]
