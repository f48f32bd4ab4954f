"""Private APIs of Inductor by which the libraries that it built of C++ kernels are kept, and used where they were not
built."""

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch._inductor.codecache import CppCodeCache

_noting: list[dict[str, Callable[[], Any]]] = []
_known: dict[str, Path] = {}
_loaded: dict[tuple[type, str], Any] = {}


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
    if key in _known:

        def load() -> Any:
            if (cls, key) not in _loaded:
                _loaded[cls, key] = cls._load_library(str(_known[key]), key)
            return _loaded[cls, key]

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
        if key not in _known:
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
    _noting.append(found := {})
    try:
        yield found
    finally:
        _noting.remove(found)


def binary(load: Callable[[], Any]) -> bytes:
    """The library of a kernel, as it lies on the disk."""
    library = load()
    return Path(getattr(library, "__file__", None) or library._name).read_bytes()


def use_kernels(binaries: Mapping[str, Path]) -> None:
    """Load these libraries, from now on, for kernels of these hashes, in place of building them."""
    rebuild_damaged()
    _known.update(binaries)


__all__ = ["binary", "noted_kernels", "rebuild_damaged", "use_kernels"]
