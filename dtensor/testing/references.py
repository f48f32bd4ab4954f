"""`FunctionReference`, which names a function so that another process can load it.

A test module that pytest loaded with `--import-mode=importlib` cannot be imported by name elsewhere. So a reference
also holds the file of the module, and the other process runs that file as a module of the same name. `processes` sends
references to the ranks it starts.
"""

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ArgumentError


@dataclass(frozen=True)
class FunctionReference:
    """A function at the top level of a module, as plain data.

    Attributes:
        module: name of the module.
        path: file of the module, None if it has none.
        qualname: dotted name of the function within the module.
    """

    module: str
    path: str | None
    qualname: str

    @classmethod
    def of(cls, fn: Callable[..., Any]) -> "FunctionReference":
        """Return the reference to `fn`.

        Raises:
            ValueError: `fn` cannot be found by name: it is a lambda, is defined inside a function, or is not a
                function.
        """
        qualname = getattr(fn, "__qualname__", None)
        if qualname is None or "<" in qualname:
            raise ArgumentError(
                f"the ranks look up {fn!r} by name, so it must be a function at the top level of a module; "
                "define it there and pass the variables it closes over as arguments"
            )
        path = getattr(sys.modules.get(fn.__module__), "__file__", None)
        return cls(fn.__module__, path and str(Path(path).resolve()), qualname)

    def load(self) -> Callable[..., Any]:
        """Return the function, after importing or running its module if necessary; for a test that is decorated to
        run on ranks, return the function that the decorator wraps."""
        found: Any = _module(self.module, self.path)
        for part in self.qualname.split("."):
            found = getattr(found, part)
        return getattr(found, "rank_function", found)


def _module(name: str, path: str | None) -> types.ModuleType:
    if name in sys.modules:
        return sys.modules[name]
    if path is None or _importable_from(name, path):
        return importlib.import_module(name)
    _make_parents(name, path)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path}, the file of module {name!r}, is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _importable_from(name: str, path: str) -> bool:
    """Return whether `import name` would load the file `path`."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return False
    return spec is not None and spec.origin is not None and Path(spec.origin).resolve() == Path(path)


def _make_parents(name: str, path: str) -> None:
    """Add empty packages to `sys.modules` for those parents of the dotted `name` that do not exist."""
    folder = Path(path).parent
    for parent in _parents(name):
        if parent not in sys.modules and not _found(parent):
            package = types.ModuleType(parent)
            package.__path__ = [str(folder)]
            sys.modules[parent] = package


def _parents(name: str) -> list[str]:
    """ "a.b.c" -> ["a", "a.b"]"""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


__all__ = ["FunctionReference"]
