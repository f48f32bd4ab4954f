"""Private APIs of AOTAutograd by which ranks exchange what it makes of equal graphs.

AOTAutograd keeps what it makes in a cache. The key is a hash of Dynamo's graph, its inputs and settings. While a
`Session` lasts, the key is the same on all ranks with that graph; what differs between them stands in a note on each
entry, and an entry whose note does not fit is passed over. Where the cache has nothing, the session is asked.

Also what stands before AOTAutograd when it traces a graph that no cache holds: `before_tracing`.
"""

import functools
import hashlib
import importlib
import io
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx
from torch._prims_common import clone_preserve_strides
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from .core import disable_current_modes
from .on_demand import when_imported

WHOLE = {"bundled_autograd_cache": True, "force_non_lazy_backward_lowering": True}
"""Settings of AOTAutograd with which it makes forward and backward at once, as one thing that can be pickled."""

TOGETHER = ("_sync_decision_cross_ranks", "_sync_cache_decision_cross_ranks")
"""Settings of AOTAutograd with which ranks compile together, by collectives."""

DONATED = "dtensor_donated"
"""The attribute of a graph's metadata that holds which arguments of a backward its code may write to, after the first
backward that kept the graph."""

NOTE = "dtensor_note"
"""The attribute of an entry of the cache that holds its note."""


class Session(Protocol):
    """The exchange of the graphs of one frame, while it is compiled."""

    def takes(self, kinds: set[type]) -> bool:
        """Whether graphs with tensors of these subclasses are exchanged."""
        ...

    def key_of_all(self) -> AbstractContextManager[str]:
        """A context in which keys do not depend on the rank, with what the key must contain besides."""
        ...

    def answers(self, key: str) -> Iterator[bytes]:
        """Entries that other ranks made, pickled, until one of them is used."""
        ...

    def making(self, key: str) -> None:
        """This rank is about to make what the key stands for."""
        ...

    def note(self) -> Any:
        """What to write on what was made."""
        ...

    def made(self, key: str, content: bytes) -> None:
        """This rank made an entry."""
        ...

    def fits(self, note: Any) -> bool:
        """Whether an entry with that note holds for this rank."""
        ...

    def using(self, key: str, note: Any) -> AbstractContextManager[None]:
        """A context in which an entry with that note is loaded."""
        ...

    def by_reference(self, obj: Any) -> Any:
        """How to pickle an object as what it is on every rank; None if it is pickled as usual."""
        ...


class Exchange(Protocol):
    """What `exchange_from_now_on` asks whenever a frame is compiled."""

    def session(self) -> AbstractContextManager[Session | None]:
        """A context in which the frame is compiled; None if its graphs are not exchanged."""
        ...


@dataclass
class _Exchanged:
    """A frame that is compiled.

    Attributes:
        session: its exchange.
        keys: of what this rank makes.
    """

    session: Session
    keys: set[str] = field(default_factory=set[str])


@dataclass
class _Lookup:
    """A graph that AOTAutograd looks for in its cache.

    Attributes:
        besides: what its key contains besides.
        session: the exchange.
        loading: what lasts until it is loaded.
        error: what the exchange raised, and AOTAutograd would pass over.
    """

    besides: str
    session: Session
    loading: ExitStack
    error: Exception | None = None


_exchanges: list[Exchange] = []
_frame: ContextVar[_Exchanged | None] = ContextVar("dtensor_exchanged_frame", default=None)
_lookup: ContextVar[_Lookup | None] = ContextVar("dtensor_looked_up_graph", default=None)


def exchange_from_now_on(exchange: Exchange) -> None:
    """Ask `exchange` while anything is compiled, until the process ends."""
    _exchanges.append(exchange)


@contextmanager
def exchanging() -> Iterator[None]:
    """A context in which Dynamo compiles a frame. A frame within another one belongs to that."""
    config = importlib.import_module("torch._functorch.config")
    if not _exchanges or _frame.get() is not None or any(getattr(config, name, False) for name in TOGETHER):
        yield
        return
    with _exchanges[-1].session() as session:
        if session is None:
            yield
            return
        token = _frame.set(_Exchanged(session))
        try:
            with config.patch(WHOLE):
                yield
        finally:
            _frame.reset(token)


def _tensors(gm: fx.GraphModule) -> tuple[set[type], str]:
    """Subclasses of the tensors in Dynamo's graph, and sizes of all: they may differ between ranks where its code does
    not."""
    kinds: set[type] = set()
    lines = []
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            values = tree_leaves(node.meta.get("example_value"))
            lines.append(" ".join([_size(x, kinds) for x in values if isinstance(x, torch.Tensor)]))
    return kinds, "\n".join(lines)


def _size(x: torch.Tensor, kinds: set[type]) -> str:
    own = f"{tuple(x.shape)} {x.dtype}"
    if not is_traceable_wrapper_subclass(x):
        return own
    kinds.add(type(x))
    inner = [getattr(x, name) for name in x.__tensor_flatten__()[0]]
    return f"{own} [{', '.join(_size(part, kinds) for part in inner if isinstance(part, torch.Tensor))}]"


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, by_reference: Callable[[Any], Any]) -> None:
        super().__init__(file)
        self._by_reference = by_reference

    def reducer_override(self, obj: Any) -> Any:
        found = self._by_reference(obj)
        return NotImplemented if found is None else found


def pickled(value: Any, by_reference: Callable[[Any], Any]) -> bytes:
    """A value as bytes, where `by_reference` says how to pickle what is another object in each process."""
    made = io.BytesIO()
    with disable_current_modes():
        _Pickler(made, by_reference).dump(value)
    return made.getvalue()


def install() -> None:
    """Stand between AOTAutograd and its cache."""
    from torch._dynamo.utils import GmWrapper
    from torch._functorch._aot_autograd import autograd_cache

    cache = autograd_cache.AOTAutogradCache
    own_key, own_load, own_look = autograd_cache.autograd_cache_key, cache.try_load, cache._lookup
    own_save, own_write, own_pickle = cache.save, cache._write_to_local_cache, cache._pickle_entry
    own_reduce = autograd_cache.AOTAutogradCachePickler.reducer_override
    own_candidates = cache.iterate_over_candidates.__func__  # pyright: ignore

    def try_load(mod: Any, args: Any, *rest: Any, **kwargs: Any) -> Any:
        frame, gm = _frame.get(), mod.gm if isinstance(mod, GmWrapper) else mod
        if frame is None or not isinstance(gm, fx.GraphModule):
            return own_load(mod, args, *rest, **kwargs)
        kinds, sizes = _tensors(gm)
        if not frame.session.takes(kinds):
            return own_load(mod, args, *rest, **kwargs)
        with frame.session.key_of_all() as besides, ExitStack() as loading:
            token = _lookup.set(now := _Lookup(f"{besides}\n{sizes}", frame.session, loading))
            try:
                found = own_load(mod, args, *rest, **kwargs)
            finally:
                _lookup.reset(token)
            if now.error is not None:
                raise now.error
            return found

    def key_of(*args: Any, **kwargs: Any) -> Any:
        key, lines = own_key(*args, **kwargs)
        now = _lookup.get()
        if now is None:
            return key, lines
        return f"{key}.{hashlib.sha256(now.besides.encode()).hexdigest()[:32]}", lines

    def reducer_override(self: Any, obj: Any) -> Any:
        now = _lookup.get()
        found = None if now is None else now.session.by_reference(obj)
        return own_reduce(self, obj) if found is None else found

    def look(key: str, *args: Any, **kwargs: Any) -> Any:
        now, frame = _lookup.get(), _frame.get()
        found = own_look(key, *args, **kwargs)
        if now is None or frame is None:
            return found
        try:
            if found is None:
                found = answered(now, key, *args, **kwargs)
            if found is None:
                frame.keys.add(key)
                now.session.making(key)
            else:
                now.loading.enter_context(now.session.using(key, getattr(found[0], NOTE)))
            return found
        except Exception as error:
            now.error = error
            raise

    def answered(now: _Lookup, key: str, *args: Any, **kwargs: Any) -> Any:
        for content in now.session.answers(key):
            own_write(key, content)
            found = own_look(key, *args, **kwargs)
            if found is not None:
                return found
        return None

    def candidates(cls: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        frame = _frame.get()
        for found in own_candidates(cls, *args, **kwargs):
            note = getattr(found[0], NOTE, None)
            if note is None or (frame is not None and frame.session.fits(note)):
                yield found

    def save(key: str, entry: Any, remote: bool) -> None:
        frame = _frame.get()
        if frame is not None and key in frame.keys:
            setattr(entry, NOTE, frame.session.note())
        own_save(key, entry, remote)

    def write(key: str, content: bytes) -> None:
        frame = _frame.get()
        if frame is not None and key in frame.keys:
            frame.session.made(key, content)
        own_write(key, content)

    def pickle_entry(entry: Any, remote: bool) -> bytes | None:
        frame = _frame.get()
        if frame is None or not hasattr(entry, NOTE):
            return own_pickle(entry, remote)
        return pickled(entry, frame.session.by_reference)

    autograd_cache.autograd_cache_key = key_of
    autograd_cache.AOTAutogradCachePickler.reducer_override = reducer_override
    cache.try_load, cache._lookup = staticmethod(try_load), staticmethod(look)
    cache.save, cache._write_to_local_cache = staticmethod(save), staticmethod(write)
    cache._pickle_entry = staticmethod(pickle_entry)
    cache.iterate_over_candidates = classmethod(candidates)  # pyright: ignore
    _keep_donated_buffers()


def _keep_donated_buffers() -> None:
    """Let a backward be repeated (`retain_graph=True`) whose code writes into the tensors saved for it.

    AOTAutograd learns in the first backward whether it may make such code, if it makes it no sooner; otherwise it
    refuses to keep the graph. A backward that keeps it is given copies of what the code may write to.
    """
    from torch._functorch._aot_autograd.runtime_wrappers import _AutogradBackwardCompiler

    own = _AutogradBackwardCompiler.get_or_compile

    def get_or_compile(self: Any, *, saved_tensors_use_once: bool) -> Callable[..., Any]:
        compiled = own(self, saved_tensors_use_once=saved_tensors_use_once)
        if saved_tensors_use_once:
            return compiled
        meta = self.fw_metadata
        if meta.bw_donated_idxs:  # what AOTAutograd refuses by; the attribute is kept where the code is
            setattr(meta, DONATED, meta.bw_donated_idxs)
            meta.bw_donated_idxs = []
        donated = getattr(meta, DONATED, None)
        return _on_copies(compiled, donated) if donated else compiled

    _AutogradBackwardCompiler.get_or_compile = get_or_compile


def _on_copies(compiled: Any, donated: list[int]) -> Callable[[list[Any]], Any]:
    """A compiled graph that is called with copies of the arguments of these indices."""

    def call(args: list[Any]) -> Any:
        for k in donated:
            args[k] = clone_preserve_strides(args[k])
        return compiled(args) if getattr(compiled, "_boxed_call", False) else compiled(*args)

    call._boxed_call = True  # pyright: ignore
    return call


class Traced(Protocol):
    """How a graph is traced: once for what AOTAutograd has to know of it beforehand, and once for good."""

    def context(self) -> AbstractContextManager[Any]:
        """The context of one trace."""
        ...

    def run(self, run_forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the graph's function in a trace."""
        ...


Prepare = Callable[[fx.Graph, Callable[..., Any], Sequence[Any], Sequence[int]], Traced | None]


def before_tracing(prepare: Prepare) -> None:
    """Call `prepare` before AOTAutograd traces a graph, and trace it in the context that it returns.

    Args:
        prepare: takes the graph; the same as a function of flat arguments; these, on fake tensors; and the indices of
            those that are parameters or buffers.
    """
    when_imported("torch._functorch.aot_autograd", functools.partial(_stand_before, prepare))


def _stand_before(prepare: Prepare) -> None:
    from torch._functorch import aot_autograd

    collect, capture = aot_autograd.run_functionalized_fw_and_collect_metadata, aot_autograd.aot_stage1_graph_capture
    last = threading.local()  # what the thread prepared last, and the metadata that AOTAutograd has of it

    @functools.wraps(collect)
    def collected(flat_fn: Any, **kwargs: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            static = kwargs.get("static_input_indices") or ()
            gm = None if kwargs.get("pre_dispatch") else _graph_of(flat_fn)
            traced = None if gm is None else prepare(gm.graph, flat_fn, args, static)
            with nullcontext() if traced is None else traced.context():
                found = collect(_run_by(traced, flat_fn), **kwargs)(*args)
            last.prepared = found, traced
            return found

        return run

    @functools.wraps(capture)
    def captured(aot_state: Any, flat_fn: Any) -> Any:
        found, traced = getattr(last, "prepared", (None, None))
        traced = traced if found is aot_state.fw_metadata else None
        with nullcontext() if traced is None else traced.context():
            return capture(aot_state, _run_by(traced, flat_fn))

    aot_autograd.run_functionalized_fw_and_collect_metadata = collected
    aot_autograd.aot_stage1_graph_capture = captured


def _graph_of(flat_fn: Any) -> fx.GraphModule | None:
    """The Dynamo graph that AOTAutograd calls by a function that it made."""
    cells = [cell.cell_contents for cell in getattr(flat_fn, "__closure__", None) or ()]
    return next((x for x in cells if isinstance(x, fx.GraphModule)), None)


def _run_by(traced: Traced | None, flat_fn: Any) -> Any:
    return flat_fn if traced is None else functools.wraps(flat_fn)(functools.partial(traced.run, flat_fn))


__all__ = ["WHOLE", "Exchange", "Session", "Traced", "before_tracing", "exchange_from_now_on", "exchanging", "install"]
__all__ += ["pickled"]
