"""What `import dtensor` leaves in torch.compile: the backend's name, and the passes in Inductor's list of custom passes.

Both only forward to `dtensor.compile`, which is imported when something is compiled. `DTENSOR_PASSES=0` in the
environment, or `dtensor.hooks.uninstall()`, switches the passes of plain `torch.compile` off.
"""

import importlib
import os
from typing import Any

from ._torch import CustomGraphPass, inductor_config, register_backend

ENVIRONMENT = "DTENSOR_PASSES"


class PlainPasses(CustomGraphPass):
    """The pass pipeline with default options, as a pass of Inductor's; leaves graphs without our operators alone."""

    def __call__(self, graph: Any) -> None:
        if any(getattr(node.target, "namespace", None) == "dtensor" for node in graph.nodes):
            importlib.import_module("dtensor.compile.inductor").run_plain(graph)

    def uuid(self) -> Any:
        return importlib.import_module("dtensor.compile.inductor").source_hash()


def chained(ours: Any) -> list[Any]:
    """Inductor's custom post-grad passes as they are, `ours` in the place of the plain ones, at the end."""
    found = inductor_config.post_grad_custom_pre_pass
    others = [] if found is None else list(found) if isinstance(found, (list, tuple)) else [found]
    return [p for p in others if not isinstance(p, PlainPasses)] + ([ours] if ours is not None else [])


def install() -> None:
    """Add the passes to plain `torch.compile`, after whatever passes are there already."""
    if os.environ.get(ENVIRONMENT) != "0":
        inductor_config.post_grad_custom_pre_pass = chained(PlainPasses())


def uninstall() -> None:
    """Take the passes out of plain `torch.compile` again."""
    inductor_config.post_grad_custom_pre_pass = chained(None) or None


def _backend(gm: Any, example_inputs: Any, **kwargs: Any) -> Any:
    return importlib.import_module("dtensor.compile").backend(gm, example_inputs, **kwargs)


register_backend(_backend, name="dtensor")
install()

__all__ = ["ENVIRONMENT", "PlainPasses", "chained", "install", "uninstall"]
