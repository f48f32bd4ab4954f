"""Builds the C++ kernels of a compiled graph several at a time.

Inductor runs the compiler once for each kernel, which takes 0.8 s, of which the kernel itself takes 0.04: the rest is
reading headers, binding to Python and linking. Here up to `MOST` kernels of a graph are one source and one library.

    kernels of a module of compiled code, as it is loaded -> units of up to MOST -> one source each -> libraries

In such a source each kernel has a namespace and a name of its own, and each is a module of the library, which Python
finds by the name of its function `PyInit_…` (PEP 489 describes libraries of several modules). If a unit cannot be
built, its kernels are built one by one.
"""

import importlib.util
import re
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from torch._inductor import async_compile
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CodeCacheFuture, CppPythonBindingsCodeCache
from torch._inductor.exc import CppCompileError

MOST = 16
"""Kernels of a unit: units are built at the same time where there are processors for it."""

KERNEL = "kernel"
"""The name that Inductor gives to the function of each kernel."""

UNITS = "_dtensor_units"
_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include\b.*\n?", re.MULTILINE)


class _Library:
    """A library of several kernels; `__file__`: its path."""

    def __init__(self, first: ModuleType, path: str) -> None:
        self.__file__ = path
        self._first = first

    def kernel(self, index: int) -> Callable[..., Any]:
        """The function of a kernel."""
        name = f"{KERNEL}_{index}"
        if not index:
            return getattr(self._first, name)
        spec = importlib.util.spec_from_file_location(name, self.__file__)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return getattr(module, name)


class _Units(CppPythonBindingsCodeCache):
    """Builds and loads units, as its base does single kernels."""

    cache: dict[str, Any] = {}  # noqa: RUF012
    entry_function = f"{KERNEL}_0"

    @classmethod
    def _load_library_inner(cls, path: str, key: str) -> Any:
        return _Library(super()._load_library_inner(path, key), path)


class _Unit:
    """Kernels that are built together."""

    def __init__(self) -> None:
        self.kernels: list[tuple[Sequence[str], str]] = []
        self._load: Callable[[], Any] | None = None
        self._alone = False

    def begin(self) -> None:
        """Begin to build it."""
        if self._load is None and len(self.kernels) > 1 and not self._alone:
            # What `submit` runs at once, without workers, would wait for a lock that is held meanwhile.
            submit = AsyncCompile.submit if async_compile.get_compile_threads() > 1 else None
            self._load = _Units.load_async(_source(self.kernels), submit_fn=submit)

    def load(self, index: int) -> Callable[..., Any]:
        """The function of a kernel, once it is built."""
        self.begin()
        if self._load is not None:
            try:
                return self._load().kernel(index)
            except CppCompileError:
                self._load, self._alone = None, True
        return CppPythonBindingsCodeCache.load_pybinding(*self.kernels[index])


class _Kernel(CodeCacheFuture):
    """A kernel of a unit that may not be built yet."""

    def __init__(self, unit: _Unit, index: int) -> None:
        self._unit, self._index = unit, index
        self._function: Callable[..., Any] | None = None

    def result(self, timeout: float | None = None) -> Callable[..., Any]:
        if self._function is None:
            self._function = self._unit.load(self._index)
        return self._function

    def __call__(self, *args: Any) -> Any:
        return self.result()(*args)


def _source(kernels: Sequence[tuple[Sequence[str], str]]) -> str:
    """One source of several kernels and their bindings: includes, then a namespace for each."""
    includes: dict[str, None] = {}
    spaces: list[str] = []
    for k, (types, code) in enumerate(kernels):
        name = f"{KERNEL}_{k}"
        given = ", ".join([f"parse_arg<{t.replace('const ', '')}>(args, {n})" for n, t in enumerate(types)])
        text = code + _Units.suffix_template.format(
            arg_len=len(types),
            call_entry_func=_Units.call_entry_function.format(given),
            entry_func=name,
            extra_parse_arg="",
        )
        includes.update(dict.fromkeys([line.strip() for line in _INCLUDE.findall(text)]))
        inside = _INCLUDE.sub("", text)
        spaces.append(f"#define {KERNEL} {name}\nnamespace of_{name} {{\n{inside}\n}}\n#undef {KERNEL}\n")
    return "\n".join(["#define PY_SSIZE_T_CLEAN", *includes, *spaces])


def _cpp_pybinding(self: Any, argtypes: list[str], source_code: str) -> Any:
    async_compile.kernel_code_log.info("CPP+Bindings Kernel:\n%s", source_code)
    units: list[_Unit] = vars(self).setdefault(UNITS, [])
    if not units or len(units[-1].kernels) == MOST:
        if units:
            units[-1].begin()
        units.append(_Unit())
    unit = units[-1]
    unit.kernels.append((tuple(argtypes), source_code))
    return _Kernel(unit, len(unit.kernels) - 1)


_own_wait = AsyncCompile.wait


def _wait(self: Any, scope: dict[str, Any]) -> None:
    for unit in vars(self).pop(UNITS, ()):
        unit.begin()
    if async_compile.get_compile_threads() <= 1:
        scope.update({name: x.result() for name, x in scope.items() if isinstance(x, _Kernel)})
    _own_wait(self, scope)


def build_together() -> None:
    """From now on, build the kernels of each module of compiled code in units."""
    AsyncCompile.cpp_pybinding = _cpp_pybinding
    AsyncCompile.wait = _wait


__all__ = ["MOST", "build_together"]
