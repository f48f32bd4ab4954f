"""Private APIs of Inductor by which the libraries that it built of C++ kernels are kept, and used where they were not
built."""

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from pathlib import Path
from typing import Any

from torch._inductor.codecache import CppCodeCache

from .units import build_together

_noting: list[dict[str, Callable[[], Any]]] = []
_known: ContextVar[Mapping[str, Path] | None] = ContextVar("dtensor_kernels", default=None)


def _key(main_code: str, device_type: str, optimized_code: str | None) -> str:
    parts = (device_type.partition(":")[0], main_code.strip(), (optimized_code or "").strip())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


_own = CppCodeCache.load_async.__func__  # pyright: ignore


def _load_async(
    cls: Any,
    main_code: str,
    device_type: str = "cpu",
    submit_fn: Any = None,
    extra_flags: Any = (),
    optimized_code: str | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    key = _key(main_code, device_type, optimized_code)
    path = (_known.get() or {}).get(key)
    if path is not None:
        load = cache(partial(_own_library, cls, str(path), path.stem))
    else:
        load = _built_again(_own(cls, main_code, device_type, submit_fn, extra_flags, optimized_code, *args, **kwargs))
    for found in _noting:
        found[key] = load
    return load


_own_library = CppCodeCache._load_library.__func__  # pyright: ignore


def _load_library(cls: Any, path: str, key: str) -> Any:
    try:
        return _own_library(cls, path, key)
    except (ImportError, OSError):
        sys.modules.pop(f"{key}.{getattr(cls, 'entry_function', '')}", None)
        Path(path).unlink(missing_ok=True)
        raise


def _built_again(load: Callable[[], Any]) -> Callable[[], Any]:
    """Build a library once more if it cannot be loaded: a process that was killed may have left half of it."""

    def again() -> Any:
        try:
            return load()
        except (ImportError, OSError):
            return load()

    return again


def rebuild_damaged() -> None:
    """From now on, build libraries of kernels again that are in Inductor's cache and cannot be loaded."""
    CppCodeCache.load_async = classmethod(_load_async)  # pyright: ignore
    CppCodeCache._load_library = classmethod(_load_library)  # pyright: ignore


@contextmanager
def noted_kernels() -> Iterator[dict[str, Callable[[], Any]]]:
    """Collect the C++ kernels that are loaded in the context: hash of the source -> loads the library."""
    rebuild_damaged()
    build_together()
    _noting.append(found := {})
    try:
        yield found
    finally:
        _noting.remove(found)


def binary(load: Callable[[], Any]) -> bytes:
    """The library of a kernel, as it lies on the disk."""
    library = load()
    return Path(getattr(library, "__file__", None) or library._name).read_bytes()


@contextmanager
def using_kernels(libraries: Mapping[str, Path]) -> Iterator[None]:
    """A context in which kernels of these hashes are loaded from these libraries, and not built.

    The name of a file must say what is in it: of the same source, other flags make another library.
    """
    rebuild_damaged()
    build_together()
    token = _known.set(libraries)
    try:
        yield
    finally:
        _known.reset(token)


__all__ = ["binary", "noted_kernels", "rebuild_damaged", "using_kernels"]
