"""Pickles functions and classes that another process cannot import: those of a notebook, a shell or a script.

A function becomes its code, the globals that its code names, defaults, and what it closes over; a class its bases and
attributes. Both are made in two steps, first empty and then filled, so that they may refer to themselves. The other
process remembers what it has made: sent again, a class is the same class there, and a function the same function, so
that instances keep their type and compiled code need not be compiled again. The lines of cells travel along, for
tracebacks and reports. What can be imported is sent by name, as pickle does it.

Globals of `__main__` arrive in `__main__` of the other process. So results which are instances of such classes are
found by their name when they come back.
"""

import dataclasses
import dis
import enum
import functools
import importlib
import io
import itertools
import linecache
import marshal
import os
import pickle
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from ...errors import ArgumentTypeError

NOT_SENT = ("__dict__", "__weakref__", "__module__", "__doc__", "_abc_impl", "__slots__")
"""Attributes of a class that are made with it."""

_numbers = itertools.count()
_names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""Function or class that was sent -> its name for the other process."""

_made: dict[str, Any] = {}
"""What this process was sent, by that name."""


def dumps(value: Any) -> bytes:
    """Return `value` pickled, with the functions and classes in it that cannot be imported.

    Raises:
        TypeError: something in it cannot be pickled; the message names the global that holds it, if there is one.
    """
    try:
        return _dumped(value)
    except Exception as error:
        where = _culprit(value)
        raise ArgumentTypeError(
            f"{where or 'what is given to the ranks'} cannot be sent to them: {type(error).__name__}: {error}; "
            "make it on the ranks, inside of the function or in a cell that begins with %%ranks"
        ) from error


def loads(data: bytes) -> Any:
    """Return what `dumps` has pickled."""
    sources, content = pickle.loads(data)
    for name, lines in sources.items():
        remember_lines(name, lines)
    return pickle.loads(content)


def remember_lines(name: str, lines: list[str]) -> None:
    """Let tracebacks and `inspect` find the lines of a file that does not exist."""
    linecache.cache[name] = (sum(map(len, lines)), None, lines, name)


def _dumped(value: Any) -> bytes:
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, pickle.HIGHEST_PROTOCOL)
    pickler.dump(value)
    return pickle.dumps((pickler.sources, buffer.getvalue()))


def _culprit(value: Any) -> str:
    """The first global of the functions in `value`, and of those that they name, that cannot be pickled."""
    functions = [item for item in (value if isinstance(value, (tuple, list)) else (value,)) if _is_own_function(item)]
    for fn in functions:  # which grows
        for name, content in _globals_of(fn).items():
            if _is_own_function(content):
                functions += [] if content in functions else [content]
            elif not _can_be_sent(content):
                return f"the global {name!r}"
    return ""


def _is_own_function(thing: Any) -> bool:
    return isinstance(thing, types.FunctionType) and _is_own(thing)


def _can_be_sent(value: Any) -> bool:
    try:
        _dumped(value)
    except Exception:
        return False
    return True


def _is_own(thing: Any) -> bool:
    """Whether a function or class cannot be imported by its name."""
    return "<" in thing.__qualname__ or not _can_be_imported(thing.__module__)


def _can_be_imported(module: str | None) -> bool:
    if module is None or module == "__main__" or getattr(sys.modules.get(module), "__spec__", None) is None:
        return False
    top = module.partition(".")[0]
    return top in sys.stdlib_module_names or any(finder.find_spec(top, None) for finder in sys.meta_path)


def _globals_of(fn: Any) -> dict[str, Any]:
    """The globals that the code of `fn` names."""
    return {name: fn.__globals__[name] for name in dict.fromkeys(_named(fn.__code__)) if name in fn.__globals__}


def _named(code: types.CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _named(constant)


def _name_of(thing: Any) -> str:
    return _names.setdefault(thing, f"{os.getpid()}-{next(_numbers)}")


class _Pickler(pickle.Pickler):
    """The pickler; `sources` has the lines of code that is in no file."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.sources: dict[str, list[str]] = {}

    def reducer_override(self, obj: Any) -> Any:
        """Called by pickle for each object."""
        if isinstance(obj, type):
            return self._class(obj) if _is_own(obj) else NotImplemented
        if isinstance(obj, types.FunctionType):
            return self._function(obj) if _is_own(obj) else NotImplemented
        reduce = REDUCERS.get(type(obj))
        return reduce(obj) if reduce is not None else NotImplemented

    def _function(self, fn: Any) -> Any:
        file = fn.__code__.co_filename
        if not os.path.exists(file) and (lines := linecache.getlines(file)):
            self.sources[file] = lines
        named = {} if _can_be_imported(fn.__module__) else _globals_of(fn)
        contents = [_Cell.of(cell) for cell in fn.__closure__ or ()]
        state = (named, contents, fn.__defaults__, fn.__kwdefaults__, fn.__annotations__, dict(vars(fn)), fn.__doc__)
        arguments = (_name_of(fn), marshal.dumps(fn.__code__), fn.__module__, fn.__name__, fn.__qualname__)
        return _make_function, arguments, state, None, None, _fill_function

    def _class(self, cls: Any) -> Any:
        first = (_name_of(cls), cls.__module__, cls.__name__, cls.__qualname__)
        if issubclass(cls, enum.Enum):
            return _make_enum, (*first, cls.__bases__, {m.name: m.value for m in cls})
        slots = vars(cls).get("__slots__")
        hidden = {*NOT_SENT, *((slots,) if isinstance(slots, str) else slots or ())}
        state = {name: value for name, value in vars(cls).items() if name not in hidden}
        arguments = (*first, type(cls), cls.__bases__, slots, cls.__doc__)
        return _make_class, arguments, state, None, None, _fill_class


@dataclasses.dataclass(frozen=True)
class _Cell:
    """What a function closes over; nothing if it has no value yet."""

    contents: tuple[Any, ...]

    @classmethod
    def of(cls, cell: Any) -> "_Cell":
        try:
            return cls((cell.cell_contents,))
        except ValueError:
            return cls(())


def _namespace(module: str | None) -> dict[str, Any]:
    """The globals of a module, which is made if it cannot be imported."""
    name = module or "__main__"
    if name not in sys.modules:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            sys.modules[name] = types.ModuleType(name)
    return vars(sys.modules[name])


def _register(key: str, thing: Any, module: str | None) -> None:
    """Remember what was made, and let it be found by its name in its module if it is at the top level there."""
    _made[key] = thing
    if thing.__qualname__ == thing.__name__ != "<lambda>":
        _namespace(module)[thing.__name__] = thing


def _make_function(key: str, code: bytes, module: str | None, name: str, qualname: str) -> Any:
    if key not in _made:
        loaded = marshal.loads(code)
        cells = tuple([types.CellType() for _ in loaded.co_freevars])
        fn = types.FunctionType(loaded, _namespace(module), name, None, cells)
        fn.__module__, fn.__qualname__ = module, qualname
        _register(key, fn, module)
    return _made[key]


def _fill_function(fn: Any, state: Any) -> None:
    named, contents, fn.__defaults__, fn.__kwdefaults__, fn.__annotations__, attributes, fn.__doc__ = state
    fn.__globals__.update(named)
    vars(fn).update(attributes)
    for cell, content in zip(fn.__closure__ or (), contents):
        if content.contents:
            cell.cell_contents = content.contents[0]


def _make_class(
    key: str, module: str | None, name: str, qualname: str, meta: Any, bases: Any, slots: Any, doc: str | None
) -> Any:
    if key not in _made:
        body = {"__module__": module, "__qualname__": qualname, "__doc__": doc}
        body |= {} if slots is None else {"__slots__": slots}
        cls = types.new_class(name, bases, {"metaclass": meta}, lambda names: names.update(body))
        _register(key, cls, module)
        _unfilled.add(cls)
    return _made[key]


_unfilled: set[Any] = set()
"""Classes that were made and have no attributes yet."""


def _fill_class(cls: Any, state: dict[str, Any]) -> None:
    if cls in _unfilled:
        _unfilled.remove(cls)
        for name, value in state.items():
            setattr(cls, name, value)


def _make_enum(key: str, module: str | None, name: str, qualname: str, bases: Any, members: dict[str, Any]) -> Any:
    if key not in _made:
        _register(key, bases[-1](name, members, module=module, qualname=qualname), module)
    return _made[key]


def _read_only(content: dict[Any, Any]) -> Any:
    return types.MappingProxyType(content)


def _constant_of_dataclasses(name: str) -> Callable[[Any], Any]:
    return lambda _: (getattr, (dataclasses, name))


REDUCERS: dict[type, Callable[[Any], Any]] = {
    types.ModuleType: lambda m: (importlib.import_module, (m.__name__,)),
    types.CodeType: lambda c: (marshal.loads, (marshal.dumps(c),)),
    types.MappingProxyType: lambda m: (_read_only, (dict(m),)),
    property: lambda p: (property, (p.fget, p.fset, p.fdel, p.__doc__)),
    staticmethod: lambda m: (staticmethod, (m.__func__,)),
    classmethod: lambda m: (classmethod, (m.__func__,)),
    functools.cached_property: lambda p: (functools.cached_property, (p.func,), {"attrname": p.attrname}),
    type(dataclasses.MISSING): _constant_of_dataclasses("MISSING"),
    type(dataclasses.KW_ONLY): _constant_of_dataclasses("KW_ONLY"),
    type(vars(dataclasses)["_FIELD"]): lambda kind: (getattr, (dataclasses, kind.name)),
}
"""Type that pickle does not know, or whose instances are compared by identity -> how it is pickled."""

__all__ = ["dumps", "loads", "remember_lines"]
