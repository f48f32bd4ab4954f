"""A compiled frame as data, and back.

A frame is a function of the user's, or the rest of one after a graph break. What Dynamo makes of it are guards, code
that takes its place, and compiled functions that the code calls, each with a forward and a backward by Inductor.
"""

import atexit
import linecache
import os
import pickle
import shutil
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

import dtensor
from dtensor.dispatch import registration, strictness
from dtensor.layout.chunks import Lengths
from dtensor.mesh.mesh import mesh_kind, mesh_of_kind
from dtensor.mesh.provenance import keeps_specs
from dtensor.program import environment
from dtensor.torch_private import frame_data, frames
from dtensor.torch_private.graph_cache import pickled
from dtensor.torch_private.kernels.libraries import binary, using_kernels

from ..backends.backend import as_returned, how_returned
from ..recording.frames import Frame, recent_frames, remember
from .hooks import Hooks, hooks, other_hooks
from .identities import Identity, digest, identities, same_objects, stand_ins
from .optimizers import Stepped, initialized, stepped
from .refusals import refusal
from .which_ranks import asks_for_rank, group_of_this_rank, other_part, uneven_lengths

OURS = ("torch", "dtensor")
"""Packages whose source is not compared line by line: a package holds for their versions only."""

OURS_IN = f"{Path(dtensor.__file__).parent}{os.sep}"
"""Where our own code lies."""


TYPED_IN = ("<stdin>", "<string>", "<console>", "<ipython", "ipykernel")
"""Parts of the names that code has in place of a file's."""


class NotPortable(Exception):
    """A compiled frame cannot be taken to another process; the message says why."""


@dataclass(frozen=True)
class SourceLines:
    """A stretch of source that was compiled.

    Attributes:
        module: name of the module.
        function: name of the function.
        first, last: its lines, from 1.
        hash: of their text.
    """

    module: str
    function: str
    first: int
    last: int
    hash: str

    def __str__(self) -> str:
        return f"{self.function} in {self.module}, lines {self.first} to {self.last}"


@dataclass(frozen=True)
class Entry:
    """A compiled frame.

    Attributes:
        function: name of the frame's function.
        module: module of the function.
        digest: of its code.
        lines: the source that was compiled, its own and that of what it calls.
        guards: pickled guards of values.
        identities: guards of objects.
        optimizers: those of which the code expects a state.
        code: what takes the place of its code.
        imports, resumed: as in `FrameRecorder`.
        backends: name -> (what AOTAutograd and Inductor made, pickled; how the results are returned).
        kernels: hash of a kernel's source -> its library.
        compiler: backend, mode and options that torch.compile was given.
        settings: what `settings` said when it was compiled.
        lengths: (length, group, part): lengths that do not divide, and this rank's part of each. It holds for ranks
            that have the same parts.
        rank: the global rank that it holds for; None if it holds for all.
        hooks: the hooks of modules that the frame refers to, which guards do not look at.
        sizes: what Dynamo has seen of the sizes of inputs, pickled.
        report: what is known of the frame for reports, pickled.
    """

    function: str
    module: str
    digest: str
    lines: tuple[SourceLines, ...] = field(repr=False)
    guards: bytes = field(repr=False)
    identities: tuple[Identity, ...] = field(repr=False)
    optimizers: tuple[Stepped, ...] = field(repr=False)
    code: Any = field(repr=False)
    imports: dict[str, str] = field(repr=False)
    resumed: dict[str, Any] = field(repr=False)
    backends: dict[str, tuple[bytes, Any]] = field(repr=False)
    kernels: dict[str, bytes] = field(repr=False)
    compiler: str
    settings: dict[str, str] = field(repr=False)
    lengths: tuple[tuple[int, str, int], ...]
    rank: int | None
    hooks: Hooks = field(repr=False)
    sizes: bytes = field(repr=False)
    report: bytes = field(repr=False)


def by_reference(obj: Any) -> Any:
    """How to pickle a mesh: as what it is in the other process. None for anything else."""
    return (mesh_of_kind, (mesh_kind(obj),)) if isinstance(obj, DeviceMesh) else None


@dataclass(frozen=True)
class Noted:
    """What was noted while a frame was compiled.

    Attributes:
        kernels: hash of a kernel's source -> loads its library.
        lengths: lengths that do not divide, by the names of groups, and this rank's part of each.
        sizes: what Dynamo has seen of the sizes of inputs.
        hooks: those of the modules that the frame refers to.
        before: the frames that reports knew before.
    """

    kernels: dict[str, Callable[[], Any]]
    lengths: Lengths
    sizes: dict[Any, Any]
    hooks: Hooks
    before: list[Frame]


def take_apart(code: types.CodeType, made: frames.FrameRecorder, noted: Noted, compiler: str) -> Entry:
    """Return what Dynamo made of `code` as data.

    Raises:
        NotPortable: something of it means nothing in another process.
    """
    if made.refused:
        raise NotPortable(made.refused)
    assert made.code is not None
    if left := made.objects - {*made.backends, *made.resumed}:
        raise NotPortable(f"its code refers to an object of this process, {min(left)}")
    backends = {name: _backend(name, function) for name, function in made.backends.items()}
    try:
        objects = tuple(identities(made.identities))
    except ValueError as error:
        raise NotPortable(str(error)) from error
    asks = any(asks_for_rank(code) for code in [code, *made.inlined] if not code.co_filename.startswith(OURS_IN))
    lengths, rank = uneven_lengths(noted.lengths, asks)
    return Entry(
        code.co_qualname,
        _module_of(code),
        digest(code),
        tuple(dict.fromkeys(_lines([code, *made.inlined]))),
        made.guards,
        objects,
        stepped(made.optimizers),
        frame_data.to_data(_without_path(made.code)),
        dict(made.imports),
        {name: frame_data.to_data(_without_path(resumed)) for name, resumed in made.resumed.items()},
        backends,
        libraries(noted.kernels),
        compiler,
        settings(),
        lengths,
        rank,
        noted.hooks,
        pickle.dumps(noted.sizes),
        reported(noted.before),
    )


def libraries(kernels: dict[str, Callable[[], Any]]) -> dict[str, bytes]:
    """The libraries of `noted_kernels`."""
    return {key: binary(load) for key, load in kernels.items()}


def as_libraries(kernels: dict[str, bytes]) -> dict[str, Path]:
    """Files with the libraries, which last as long as this process."""
    return {key: _on_disk(library) for key, library in kernels.items()}


def reported(before: list[Frame]) -> bytes:
    """The frames that were compiled since, as data for reports; none where they hold sizes that have no meaning without
    the trace."""
    found = [known for known in recent_frames() if not any(known is other for other in before)]
    try:
        return pickle.dumps([replace(frame, roots=[], folders={}) for frame in found])
    except (pickle.PicklingError, TypeError, AttributeError):
        return pickle.dumps([])


def _backend(name: str, function: Any) -> tuple[bytes, Any]:
    """A compiled function as data, and how its results are returned."""
    content = frame_data.artifact(name)
    if content is None:
        raise NotPortable(
            "AOTAutograd kept nothing of a graph: another backend than Inductor compiles it, or caches are off, as "
            "for a dump, a record or the option verify"
        )
    if foreign := group_of_this_rank(frame_data.sources(content)):
        raise NotPortable(
            f"it communicates over the process group {foreign!r}, whose name may mean another group on another rank; "
            "make the mesh with dtensor.init_device_mesh"
        )
    try:
        return pickled(content, by_reference), how_returned(function)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise NotPortable(f"a compiled graph cannot be pickled: {error}") from error


def _without_path(code: types.CodeType) -> types.CodeType:
    return _located(code, "")


def _located(code: types.CodeType, file: str) -> types.CodeType:
    inner = [_located(c, file) if isinstance(c, types.CodeType) else c for c in code.co_consts]
    return code.replace(co_filename=file, co_consts=tuple(inner))


def _module_of(code: types.CodeType) -> str:
    return next((name for name, path in _files() if path == code.co_filename), "")


def _files() -> Iterator[tuple[str, str]]:
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if path:
            yield name, path


def _lines(codes: Sequence[types.CodeType]) -> Iterator[SourceLines]:
    names: dict[str, str] = {}
    for name, path in _files():
        names.setdefault(path, name)
    for code in codes:
        module = names.get(code.co_filename, "")
        if module.partition(".")[0] in OURS:
            continue
        if not module and _is_typed_in(code):
            raise NotPortable(
                f"{code.co_qualname} is written in a shell or notebook, so that another process cannot see whether it "
                "has changed; put it into a file"
            )
        first, last = code.co_firstlineno, _last_line(code)
        yield SourceLines(module, code.co_qualname, first, last, _hash(code.co_filename, first, last))


def _is_typed_in(code: types.CodeType) -> bool:
    """Whether code has no file, unless the standard library generated it: methods of dataclasses and named tuples."""
    generated = code.co_qualname.startswith("__create_fn__") or code.co_name == "<lambda>"
    return not generated and any(word in code.co_filename for word in TYPED_IN)


def _last_line(code: types.CodeType) -> int:
    own = [line for *_, line in code.co_lines() if line is not None]
    return max([code.co_firstlineno, *own, *[_last_line(c) for c in code.co_consts if isinstance(c, types.CodeType)]])


def _hash(file: str, first: int, last: int) -> str:
    return sha256("".join(linecache.getlines(file)[first - 1 : last]).encode()).hexdigest()


def changed_source(entry: Entry) -> str:
    """Return which of the source that was compiled is another one here, in words; "" if none is."""
    for lines in entry.lines:
        module = sys.modules.get(lines.module)
        if lines.module and module is None:
            return f"the module {lines.module} is not imported here"
        file = getattr(module, "__file__", None) or ""
        if lines.module and _hash(file, lines.first, lines.last) != lines.hash:
            return f"the source of {lines} has changed ({Path(file).name})"
    return ""


def settings() -> dict[str, str]:
    """Return what decides how a frame is compiled, in words: settings of torch.compile, and those of this library."""
    ours = {
        "environment": environment.fingerprint(),
        "rules": registration.fingerprint(),
        "strict": strictness.fingerprint(),
        "record": keeps_specs(),
    }
    return frames.settings() | {f"dtensor {name}": str(value) for name, value in ours.items()}


def changed_settings(entry: Entry) -> str:
    """Return which setting is another one here than when the frame was compiled, in words; "" if none is."""
    here = settings()
    name = next((n for n in sorted({*entry.settings, *here}) if entry.settings.get(n) != here.get(n)), None)
    if name is None:
        return ""
    return f"the setting {name} was {entry.settings.get(name, 'not there')}, and is {here.get(name, 'not there')}"


@cache
def _folder() -> Path:
    """A folder of this process, which is removed when it ends."""
    found = Path(mkdtemp(prefix="dtensor-kernels-"))
    atexit.register(_remove, found, os.getpid())
    return found


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:  # not a fork of it
        shutil.rmtree(folder, ignore_errors=True)


def _on_disk(library: bytes) -> Path:
    """The file of a library, whose name says what is in it."""
    path = _folder() / f"{sha256(library).hexdigest()[:32]}.so"
    if not path.exists():
        path.write_bytes(library)
    return path


def put_together(entry: Entry, frame: Any) -> tuple[Any, str]:
    """Return the guarded code of a frame from `entry`, or None and the first thing that does not fit, in words."""
    scope = frame.f_globals
    frame_data.prepare_globals(scope, entry.imports)
    try:
        guards = frame_data.guard_manager(entry.guards, frame.f_code, scope)
    except Exception as error:  # whatever unpickling raises
        return None, f"its guards cannot be read: {error}; make the package again"
    if difference := (
        other_part(entry.lengths, entry.rank)
        or initialized(entry.optimizers, frame.f_locals, scope)
        or other_hooks(entry.hooks, hooks(frame.f_code, frame.f_locals, scope), frame.f_locals)
    ):
        return None, f"{difference}; make the package again"
    if (failed := guards.failed(frame.f_locals)) is not None:
        return None, refusal(failed, frame.f_locals, scope)
    manager = guards.manager
    found, difference = stand_ins(entry.identities, frame.f_locals, scope)
    if difference:
        return None, difference
    if found:
        frame_data.add_identities(
            manager, same_objects(found, scope), "an object is another one than when it was loaded"
        )
    try:
        with using_kernels(as_libraries(entry.kernels)):
            backends = {
                name: as_returned(frame_data.runnable(pickle.loads(content)), how)
                for name, (content, how) in entry.backends.items()
            }
    except Exception as error:  # whatever unpickling, and loading libraries of kernels, raises
        return None, f"its graphs cannot be loaded: {type(error).__name__}: {error}; make the package again"
    frame_data.see_sizes(pickle.loads(entry.sizes))
    for known in pickle.loads(entry.report):
        remember(known)
    file = frame.f_code.co_filename
    resumed = {name: _located(frame_data.from_data(data), file) for name, data in entry.resumed.items()}
    return frame_data.install(frame, manager, _located(frame_data.from_data(entry.code), file), resumed, backends), ""


__all__ = ["Entry", "NotPortable", "Noted", "SourceLines", "as_libraries", "by_reference", "changed_settings"]
__all__ += ["changed_source", "libraries", "put_together", "reported", "settings", "take_apart"]
