"""The hooks that `import dtensor` installs in torch.compile: the backend `"dtensor"`, and the passes in Inductor.

They wait until torch imports Dynamo and Inductor, and only forward to `dtensor.compile`, which is imported on the first
compilation.
"""

import importlib
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cache
from typing import Any

import torch.distributed as dist

from ..dispatch.global_view import in_view
from ..mesh.mesh import look_up_prepared
from ..program import environment
from ..program.source_lines import is_users
from ..torch_private.dynamo import compile_nothing, compile_with, register_backend, stand_before_dynamo
from ..torch_private.graph_cache import Traced, before_tracing, exchange_from_now_on
from ..torch_private.on_demand import when_imported
from ..torch_private.own_errors import show_lines_of
from ..torch_private.phases import Compilation, watch_compilations
from .tensor import DTensor

OURS = "dtensor"
"""The name of the backend."""

_forever = ExitStack()


def dump_from_now_on() -> None:
    """Dump everything that this process compiles, if the environment names a folder for it."""
    folder = environment.text("dump")
    if folder:
        _forever.enter_context(importlib.import_module("dtensor.compile").dump(folder))


def examine_from_now_on() -> None:
    """Examine every graph that this process compiles, if the environment names a folder for what is found."""
    folder = environment.findings()
    if folder:
        importlib.import_module("dtensor.compile.bisect").watch(folder)


class _Sharing:
    """Lets one rank of a job compile for all, by `dtensor.compile`; an `Exchange` of `torch_private.graph_cache`."""

    def session(self) -> AbstractContextManager[Any]:
        """Nothing is exchanged where there are no other ranks with which this one has a mesh."""
        if not dist.is_initialized() or dist.get_world_size() == 1 or not look_up_prepared():
            return nullcontext()
        return importlib.import_module("dtensor.compile.packages.sharing").sharing.session()


def share_from_now_on() -> None:
    """Let one rank of a job compile for all, unless the environment says no when something is compiled."""
    stand_before_dynamo()
    exchange_from_now_on(_Sharing())


def load_from_now_on() -> None:
    """Take compiled code from a package, if the environment names one.

    Raises:
        ValueError: a switch is neither 0 nor 1.
    """
    if environment.setting("DTENSOR_PACKAGE"):
        importlib.import_module("dtensor.compile.packages.package").load_if_asked()


class _Progress:
    """Tells the user what is compiled, by `dtensor.compile`; see `dtensor.torch_private.phases.Watcher`."""

    def began(self, compilation: Compilation) -> None:
        _told().began(compilation)

    def repeated(self, compilation: Compilation) -> None:
        _told().repeated(compilation)

    def ended(self, compilation: Compilation) -> None:
        _told().ended(compilation)


@cache
def _told() -> Any:
    return importlib.import_module("dtensor.compile.recording.progress").Progress()


def tell_from_now_on() -> None:
    """Tell the user who waits what is compiled."""
    stand_before_dynamo()
    show_lines_of(is_users)
    watch_compilations(_Progress())


def limit_from_now_on() -> None:
    """Compile no further than the environment says, whatever backend the program names.

    Raises:
        ValueError: it says something else than a level.
    """
    level = environment.level()
    if level == "eager":
        compile_nothing()
    elif level in ("dynamo", "aot_eager"):
        compile_with(_leveled, unless=(OURS, "eager", *([level] if level == "aot_eager" else [])))


def _leveled(gm: Any, example_inputs: Any) -> Any:
    return importlib.import_module("dtensor.compile.backends.backend").leveled(gm, example_inputs)


def _prepared(graph: Any, run_forward: Any, inputs: Any, parameters: Any) -> Traced | None:
    """Decide the layouts of a graph that is in a global view. What has DTensors has its kernels built together."""
    if any(isinstance(x, DTensor) for x in inputs):
        when_imported("torch._inductor.async_compile", _build_together)
    if not in_view(graph):
        return None
    return importlib.import_module("dtensor.parallel.decisions.frames").decide_frame(run_forward, inputs, parameters)


def _build_together() -> None:
    importlib.import_module("dtensor.torch_private.kernels.units").build_together()


def backend(gm: Any, example_inputs: Any, **kwargs: Any) -> Any:
    """The `torch.compile` backend `"dtensor"`. See `dtensor.compile.backend`."""
    return importlib.import_module("dtensor.compile").backend(gm, example_inputs, **kwargs)


register_backend(backend, OURS)
before_tracing(_prepared)
when_imported("torch._inductor.config", lambda: importlib.import_module("dtensor.tensor.plain_passes"))

__all__ = [
    "backend",
    "dump_from_now_on",
    "examine_from_now_on",
    "limit_from_now_on",
    "load_from_now_on",
    "share_from_now_on",
    "tell_from_now_on",
]
