"""What takes long to import waits until it is needed: sympy, Dynamo and Inductor, torch's checkpoints.

The modules named at the end are imported when an attribute of one is first read; in an annotation they stand for
nothing at run time, so a file that annotates with them begins with `from __future__ import annotations`.

What changes a module of torch is installed by `when_imported` once torch imports that module, before anybody else can
use it. Torch offers no such place: the entry points of Dynamo are only read when a backend is looked up by its name.
"""

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any, ParamSpec

P = ParamSpec("P")


class _Finder:
    """Stands first in `sys.meta_path` while modules are waited for, and lets the others find them.

    Attributes:
        waiting: module -> what is called once it has been executed, in order.
    """

    def __init__(self) -> None:
        self.waiting: dict[str, list[Callable[[], object]]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.waiting:
            return None
        others = [finder.find_spec for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next((found for find in others if (found := find(name, path, target)) is not None), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                for call in self.waiting.get(name, ()):
                    call()
                self.waiting.pop(name, None)

            loader.exec_module = exec_module
        return spec


_finder = _Finder()


def when_imported(name: str, call: Callable[[], object]) -> None:
    """Call `call` once the module `name` has been imported, at once if it has. An error is raised by that import."""
    if name in sys.modules and name not in _finder.waiting:
        call()
        return
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _finder.waiting.setdefault(name, []).append(call)


def with_dynamo(install: Callable[P, object]) -> Callable[P, None]:
    """Make a call of `install`, which changes Dynamo, wait until torch imports it. It may import nothing else."""

    @functools.wraps(install)
    def wait(*args: P.args, **kwargs: P.kwargs) -> None:
        when_imported("torch._dynamo", functools.partial(install, *args, **kwargs))

    return wait


class _Module:
    """Stands for a module that is imported when an attribute is read or set."""

    def __init__(self, name: str) -> None:
        vars(self)["__name__"] = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(vars(self)["__name__"]), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(importlib.import_module(vars(self)["__name__"]), name, value)


if TYPE_CHECKING:
    import sympy as sympy
    from torch._inductor import config as inductor_config
    from torch._inductor import custom_graph_pass as custom_graph_pass
    from torch.distributed.checkpoint import metadata as checkpoint_metadata
    from torch.distributed.checkpoint import planner as checkpoint_planner
    from torch.fx.experimental import symbolic_shapes as symbolic_shapes
    from torch.utils._sympy import functions as size_functions
    from torch.utils._sympy import value_ranges as value_ranges
else:
    sympy = _Module("sympy")
    inductor_config = _Module("torch._inductor.config")
    custom_graph_pass = _Module("torch._inductor.custom_graph_pass")
    checkpoint_metadata = _Module("torch.distributed.checkpoint.metadata")
    checkpoint_planner = _Module("torch.distributed.checkpoint.planner")
    symbolic_shapes = _Module("torch.fx.experimental.symbolic_shapes")
    size_functions = _Module("torch.utils._sympy.functions")
    value_ranges = _Module("torch.utils._sympy.value_ranges")

__all__ = ["checkpoint_metadata", "checkpoint_planner", "custom_graph_pass", "inductor_config", "size_functions"]
__all__ += ["symbolic_shapes", "sympy", "value_ranges", "when_imported", "with_dynamo"]
