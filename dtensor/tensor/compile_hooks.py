"""The hooks that `import dtensor` installs in torch.compile: the backend `"dtensor"`, and the passes in Inductor.

The hooks only forward to `dtensor.compile`, which is imported on the first compilation. Plain `torch.compile` takes its
options from the environment (`dtensor.program.environment`). `DTENSOR_PASSES=0` or `uninstall` turns its passes off.
"""

import importlib
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cache
from typing import Any

import torch.distributed as dist

from ..mesh.mesh import look_up_prepared
from ..mesh.provenance import keeps_specs
from ..program import environment
from ..program.source_lines import is_users
from ..torch_private.compiling import (
    CustomInferenceAwareGraphPass,
    CustomPartitionerFn,
    compile_nothing,
    compile_with,
    inductor_config,
    register_backend,
)
from ..torch_private.dynamo import stand_before_dynamo
from ..torch_private.graph_cache import exchange_from_now_on
from ..torch_private.own_errors import show_lines_of
from ..torch_private.partitioning import min_cut_partition
from ..torch_private.phases import Compilation, watch_compilations

STAGES = ("joint_custom_pre_pass", "post_grad_custom_pre_pass")
"""The custom pass options of Inductor that the passes of plain `torch.compile` are added to."""


INDUCTOR = "dtensor.compile.backends.inductor"
"""The module that has what runs in Inductor's places."""

PARTITIONER = "custom_partitioner_fn"
"""The Inductor option that holds the custom partitioner. It holds only one."""


OURS = "dtensor"
"""The name of the backend."""

_forever = ExitStack()


class PlainPasses(CustomInferenceAwareGraphPass):
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


class PlainPartition(CustomPartitionerFn):
    """Partitions with the environment's options and delegates to the partitioner that was installed before.

    Graphs without dtensor operators go straight to that partitioner.
    """

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


def uninstall() -> None:
    """Remove the passes from plain `torch.compile`."""
    for stage in STAGES:
        setattr(inductor_config, stage, chained(stage, None) or None)
    setattr(inductor_config, PARTITIONER, others_partitioner())


def backend(gm: Any, example_inputs: Any, **kwargs: Any) -> Any:
    """The `torch.compile` backend `"dtensor"`. See `dtensor.compile.backend`."""
    return importlib.import_module("dtensor.compile").backend(gm, example_inputs, **kwargs)


register_backend(backend, OURS)
install()

__all__ = [
    "PARTITIONER",
    "STAGES",
    "PlainPasses",
    "backend",
    "chained",
    "dump_from_now_on",
    "examine_from_now_on",
    "install",
    "limit_from_now_on",
    "load_from_now_on",
    "share_from_now_on",
    "tell_from_now_on",
    "uninstall",
]
