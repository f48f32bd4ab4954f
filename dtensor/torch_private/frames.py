"""Private APIs of Dynamo by which a frame that it compiled is taken apart into data, and put into another process.

Dynamo asks a `ConvertFrameAssert` to compile a frame that no guarded code fits. `intercept` puts a handler before it,
which may answer from data, or give it a `FrameRecorder` that collects what it makes. All of it is one `compilation`, of
which `phases` tells.
"""

import itertools
import secrets
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch

# isort: split
from torch._dynamo import bytecode_transformation, convert_frame, guards
from torch._dynamo import config as dynamo_config
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.types import wrap_guarded_code
from torch._dynamo.utils import orig_code_map
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd import autograd_cache
from torch._inductor import config as inductor_config

from .phases import compilation

BY_IDENTITY = ("ID_MATCH", "FUNCTION_MATCH", "CLASS_MATCH", "MODULE_MATCH", "CLOSURE_MATCH")
"""Guards that hold for one object of one process."""

WITHIN_A_PROCESS = ("NN_MODULE", "DICT_VERSION")
"""Guards of which nothing can be said in another process."""

WHOLE = {"bundled_autograd_cache": True, "force_non_lazy_backward_lowering": True}
"""Settings of AOTAutograd with which it makes forward and backward at once, as one thing that can be pickled."""

OF_THIS_MACHINE = ("base_dir", "debug_dir_root", "compile_threads", *WHOLE)
"""Settings that say nothing about what is made: paths, threads, and what is set while a frame is recorded."""


@dataclass
class FrameRecorder:
    """Collects what Dynamo makes of a frame; Dynamo takes it for a `CompilePackage`.

    Attributes:
        guards: the guards that hold values, pickled.
        identities: expressions that must give the very objects, and these objects.
        code: what runs in place of the frame's code.
        inlined: code of functions that were traced into.
        imports: names in the frame's globals -> modules that they stand for.
        resumed: names in the frame's globals -> code that runs after a graph break.
        backends: names in the frame's globals -> the compiled functions.
        objects: other names in the frame's globals that were made for the compiled code.
        refused: why this cannot be taken to another process; "" if it can.
        reduce: how to pickle an object that guards refer to, as `object.__reduce__` says it; None for torch's way.
    """

    guards: bytes = b""
    identities: list[tuple[str, Any]] = field(default_factory=list[tuple[str, Any]])
    code: types.CodeType | None = None
    inlined: list[types.CodeType] = field(default_factory=list[types.CodeType])
    imports: dict[str, str] = field(default_factory=dict[str, str])
    resumed: dict[str, types.CodeType] = field(default_factory=dict[str, types.CodeType])
    backends: dict[str, Any] = field(default_factory=dict[str, Any])
    objects: set[str] = field(default_factory=set[str])
    refused: str = ""
    reduce: Callable[[Any], Any] = field(default=lambda obj: None)

    def code_context(self, code: types.CodeType) -> Any:
        return nullcontext()

    def add_guarded_code(self, guards_state: bytes, dynamo_code: types.CodeType) -> None:
        self.guards, self.code = guards_state, dynamo_code

    def add_inlined_source(self, sources: Sequence[types.CodeType]) -> None:
        self.inlined = list(dict.fromkeys(sources))

    def update_device_type(self, graph: Any) -> None:
        """Dynamo tells the device; guards hold it already."""

    def bypass_current_entry(self) -> None:
        self.refused = self.refused or "Dynamo says that it cannot be kept"

    def add_resume_function(self, python_code: types.CodeType, python_module: str, function_name: str) -> None:
        self.resumed[function_name] = python_code

    def add_import_source(self, alias: str, module_name: str) -> None:
        self.imports[alias] = module_name

    def add_backend_id(self, backend_id: str, backend: Any = None) -> None:
        self.backends[backend_id] = backend


class Handler(Protocol):
    """What `intercept` asks, on each frame that Dynamo is to compile.

    Attributes:
        anew: whether to compile what this handler has no answer for, and not to ask those that came before.
    """

    anew: ClassVar[bool]

    def answer(self, frame: Any, compiler: str) -> Any:
        """A `GuardedCode` for the frame, or None. `compiler` says by what torch.compile would compile it."""
        ...

    def recording(self, frame: Any, compiler: str) -> AbstractContextManager[FrameRecorder | None]:
        """A context in which the frame is compiled, with what collects that; None if nothing is to be collected."""
        ...


_recorder: ContextVar[FrameRecorder | None] = ContextVar("dtensor_frame_recorder", default=None)
_handlers: list[Handler] = []


@contextmanager
def intercept(handler: Handler) -> Iterator[None]:
    """A context in which `handler` comes before Dynamo."""
    install()
    _handlers.append(handler)
    try:
        yield
    finally:
        no_longer(handler)


def intercept_from_now_on(handler: Handler, *, last: bool = False) -> None:
    """As `intercept`, until the process ends. `last`: it is asked after all others; without its answer the frame is
    compiled."""
    install()
    _handlers.insert(0 if last else len(_handlers), handler)


def no_longer(handler: Handler) -> None:
    """Undo `intercept_from_now_on`."""
    if handler in _handlers:
        _handlers.remove(handler)


def install() -> None:
    """Stand before Dynamo from now on, without a handler at first: what it compiles is then told as a compilation."""
    if convert_frame.ConvertFrameAssert.__call__ is not _compile:
        convert_frame.ConvertFrameAssert.__call__ = _compile
        guards.CheckFunctionManager.serialize_guards = _serialize_guards
        guards.GuardsStatePickler.reducer_override = _reduce
        autograd_cache.AOTAutogradCache._lookup = staticmethod(_lookup)
        OutputGraph.install_global_unsafe = _install_global_unsafe
        OutputGraph.bypass_package = _bypass_package


_own_compile = convert_frame.ConvertFrameAssert.__call__
_own_serialize = guards.CheckFunctionManager.serialize_guards
_own_lookup = autograd_cache.AOTAutogradCache._lookup
_own_install_unsafe = OutputGraph.install_global_unsafe
_own_bypass = OutputGraph.bypass_package
_own_reduce = guards.GuardsStatePickler.reducer_override


def _install_global_unsafe(self: Any, name: str, value: Any) -> None:
    """As Dynamo puts a value into the frame's globals."""
    _own_install_unsafe(self, name, value)
    recorder = _recorder.get()
    if recorder is not None and not isinstance(value, dict):  # a dict: the builtins
        recorder.objects.add(name)


def _bypass_package(self: Any, reason: str = "", **kwargs: Any) -> None:
    """As Dynamo says that it cannot keep a frame, without a warning where the recorder says so."""
    recorder = _recorder.get()
    if recorder is None:
        _own_bypass(self, reason, **kwargs)
    else:
        recorder.refused = recorder.refused or reason
        self.package = None


def _reduce(self: Any, obj: Any) -> Any:
    """As torch reduces an object that guards refer to; it forgets whether a subclass's tensor requires a gradient."""
    recorder = _recorder.get()
    ours = recorder.reduce(obj) if recorder is not None else None
    if ours is not None:
        return ours
    made = _own_reduce(self, obj)
    subclass = isinstance(made, tuple) and made[0] == type(self)._unpickle_traceable_wrapper_subclass
    return (_requiring_grad, made) if subclass and obj.requires_grad else made


def _lookup(*args: Any, **kwargs: Any) -> Any:
    """As AOTAutograd looks into its cache; what is recorded is traced anew, so that all that it depends on is seen."""
    return None if _recorder.get() is not None else _own_lookup(*args, **kwargs)


def _requiring_grad(make: Callable[..., torch.Tensor], args: tuple[Any, ...]) -> torch.Tensor:
    return make(*args).requires_grad_()


def _compile(self: Any, frame: Any, cache_entry: Any, hooks: Any, frame_state: Any, *, skip: int = 0) -> Any:
    given = self, frame, cache_entry, hooks, frame_state
    if self._export or frame.f_code in convert_frame.output_codes or not convert_frame.has_tensor_in_frame(frame):
        return _own_compile(*given, skip=skip + 1)
    with compilation(_named(frame)) as made:
        found = _answered(*given, skip=skip + 2) if _handlers else _own_compile(*given, skip=skip + 1)
        made.made = made.made or found.guarded_code is not None
        return found


def _named(frame: Any) -> str:
    """The name of a frame's function; of a module's method, with the class of the module."""
    owner = frame.f_locals.get("self")
    return (
        f"{type(owner).__name__}.{frame.f_code.co_name}"
        if isinstance(owner, torch.nn.Module)
        else frame.f_code.co_qualname
    )


def _answered(self: Any, frame: Any, cache_entry: Any, hooks: Any, frame_state: Any, *, skip: int) -> Any:
    compiler = _described(self._torchdynamo_orig_backend)
    for handler in reversed(_handlers):
        found = handler.answer(frame, compiler)
        if found is not None:
            convert_frame.input_codes.add(frame.f_code)
            convert_frame.output_codes.add(found.code)
            orig_code_map[found.code] = frame.f_code
            return wrap_guarded_code(found)
        if handler.anew:
            break
    with ExitStack() as stack:
        recorder = None
        for handler in reversed(_handlers):
            recorder = stack.enter_context(handler.recording(frame, compiler))
            if recorder is not None:
                break
        if recorder is None:
            return _own_compile(self, frame, cache_entry, hooks, frame_state, skip=skip)
        token, own = _recorder.set(recorder), self._package
        self._package = recorder
        try:
            with _names_of_this_process(), functorch_config.patch(WHOLE):
                return _own_compile(self, frame, cache_entry, hooks, frame_state, skip=skip)
        finally:
            self._package = own
            _recorder.reset(token)


@contextmanager
def _names_of_this_process() -> Iterator[None]:
    """A context in which the names that Dynamo makes are none that another process makes.

    It numbers them from 0. A frame from another process and one that is compiled here would take the same names.
    """
    own = bytecode_transformation._unique_id_counter
    bytecode_transformation._unique_id_counter = itertools.count(secrets.randbits(62))
    try:
        yield
    finally:
        bytecode_transformation._unique_id_counter = own


def _described(compiler: Any) -> str:
    """The backend, mode and options that torch.compile was given, as text."""
    compiler = convert_frame.innermost_backend(compiler)
    if isinstance(compiler, torch._TorchCompileInductorWrapper):
        return f"inductor {sorted(compiler.config.items())} dynamic={compiler.dynamic}"
    if isinstance(compiler, torch._TorchCompileWrapper):
        return f"{compiler.compiler_name} {sorted(compiler.kwargs.items())} dynamic={compiler.dynamic}"
    return f"{getattr(compiler, '__module__', '')}.{getattr(compiler, '__qualname__', type(compiler).__qualname__)}"


def _serialize_guards(self: Any, builder: Any, sorted_guards: Any, output_graph: Any) -> bytes:
    """Pickle the guards that hold values, and tell the recorder of those that hold an object."""
    recorder = _recorder.get()
    if recorder is None:
        return _own_serialize(self, builder, sorted_guards, output_graph)
    kept = []
    recorder.identities.clear()
    for guard in sorted_guards:
        kinds = {guard.create_fn_name(), *(guard.guard_types or ())}
        if found := kinds.intersection(WITHIN_A_PROCESS):
            recorder.refused = recorder.refused or f"a guard {min(found)} on {guard.name} holds in this process only"
        if kinds.intersection(BY_IDENTITY) or guard._unserializable:
            recorder.identities.append((guard.name, builder.get(guard)))
        elif "WEAKREF_ALIVE" not in kinds:
            kept.append(guard)
    try:
        return _own_serialize(self, builder, kept, output_graph)
    except Exception as error:  # whatever pickle, torch or a user's class raises
        recorder.refused = recorder.refused or f"its guards cannot be pickled: {error}"
        return b""


def settings() -> dict[str, str]:
    """The settings of torch.compile that change what it makes: name -> value, as text."""
    found = {}
    for module in (dynamo_config, functorch_config, inductor_config):
        for name, value in module.save_config_portable().items():
            said = str(sorted(value, key=repr)) if isinstance(value, (set, frozenset)) else repr(value)
            if name not in OF_THIS_MACHINE and not callable(value) and " at 0x" not in said:
                found[f"{module.__name__}.{name}"] = said
    return found


def caches_are_on() -> bool:
    """Whether AOTAutograd and Inductor keep what they make in caches, without which they make nothing that can be
    pickled."""
    return bool(functorch_config.enable_autograd_cache and inductor_config.fx_graph_cache) and not (
        inductor_config.force_disable_caches
    )


__all__ = [
    "FrameRecorder",
    "Handler",
    "caches_are_on",
    "install",
    "intercept",
    "intercept_from_now_on",
    "no_longer",
    "settings",
]
