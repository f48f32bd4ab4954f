"""Private APIs of Dynamo by which a frame that it compiled is taken apart into data, and put into another process.

Dynamo asks a `ConvertFrameAssert` to compile a frame that no guarded code fits. `intercept` puts a handler before it,
which may answer from data, or give it a `FrameRecorder` that collects what it makes. All of it is one `compilation`, of
which `phases` tells.
"""

import itertools
import secrets
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch

from .dynamo import own_compile  # first: the version of torch is checked there
from .training.optimizers import Call, noted_call

# isort: split
from torch._dynamo import bytecode_transformation, convert_frame, guards, output_graph
from torch._dynamo import config as dynamo_config
from torch._dynamo.exc import Unsupported
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.types import wrap_guarded_code
from torch._dynamo.utils import orig_code_map
from torch._dynamo.variables import builder
from torch._dynamo.variables.optimizer import OptimizerVariable
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd import autograd_cache
from torch._inductor import config as inductor_config

from . import graph_cache
from .graph_cache import WHOLE, exchanging
from .own_errors import in_the_open
from .phases import compilation, repeats
from .training.whole_steps import is_whole_step

BY_IDENTITY = ("ID_MATCH", "FUNCTION_MATCH", "CLASS_MATCH", "MODULE_MATCH", "CLOSURE_MATCH")
"""Guards that hold for one object of one process."""

WITHIN_A_PROCESS = ("NN_MODULE", "DICT_VERSION")
"""Guards of which nothing can be said in another process."""

OF_THIS_MACHINE = ("base_dir", "debug_dir_root", "compile_threads", *WHOLE)
"""Settings that say nothing about what is made: paths, threads, and what is set while a frame is recorded."""


OF_AN_OPTIMIZER = (
    "the step of an optimizer takes a tensor that is neither a parameter, nor a gradient, nor in the optimizer's "
    "state; put it into the state"
)


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
        optimizers: expressions -> the optimizers whose state Dynamo initialized, and by which calls.
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
    optimizers: dict[str, tuple[Any, list[Call]]] = field(default_factory=dict[str, tuple[Any, list[Call]]])
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


def intercept_from_now_on(handler: Handler) -> None:
    """As `intercept`, until the process ends."""
    install()
    _handlers.append(handler)


def no_longer(handler: Handler) -> None:
    """Undo `intercept_from_now_on`."""
    if handler in _handlers:
        _handlers.remove(handler)


def install() -> None:
    """Stand before Dynamo from now on, without a handler at first: what it compiles is then told as a compilation."""
    own_compile()  # as it is before this
    if convert_frame.ConvertFrameAssert.__call__ is not _compile:
        convert_frame.ConvertFrameAssert.__call__ = _compile
        convert_frame.get_and_maybe_log_recompilation_reasons = _recompilation_reasons
        guards.CheckFunctionManager.serialize_guards = _serialize_guards
        guards.GuardsStatePickler.reducer_override = _reduce
        autograd_cache.AOTAutogradCache._lookup = staticmethod(_lookup)
        OutputGraph.install_global_unsafe = _install_global_unsafe
        OutputGraph.bypass_package = _bypass_package
        builder.get_static_address_type = output_graph.get_static_address_type = _static_address_type
        builder.is_from_optimizer_source = guards.is_from_optimizer_source = _is_from_optimizer_source
        OptimizerVariable.get_python_args = _get_python_args
        graph_cache.install()


_own_reasons = convert_frame.get_and_maybe_log_recompilation_reasons
_own_serialize = guards.CheckFunctionManager.serialize_guards
_own_lookup = autograd_cache.AOTAutogradCache._lookup
_own_install_unsafe = OutputGraph.install_global_unsafe
_own_bypass = OutputGraph.bypass_package
_own_reduce = guards.GuardsStatePickler.reducer_override
_own_static_address_type = builder.get_static_address_type
_own_is_from_optimizer_source = builder.is_from_optimizer_source
_own_python_args = OptimizerVariable.get_python_args


def _install_global_unsafe(self: Any, name: str, value: Any) -> None:
    """As Dynamo puts a value into the frame's globals."""
    _own_install_unsafe(self, name, value)
    recorder = _recorder.get()
    if recorder is None or isinstance(value, dict):  # a dict: the builtins
        return
    behind = value() if isinstance(value, weakref.ref) else None
    if isinstance(behind, torch.Tensor):
        recorder.refused = recorder.refused or OF_AN_OPTIMIZER
    if not isinstance(behind, torch.optim.Optimizer):  # of which only a guard asks whether it is alive
        recorder.objects.add(name)


def _static_address_type(value: Any) -> Any:
    """As Dynamo tells whether a tensor is known by its address; what is recorded takes every tensor as an input, and so
    does a whole step, whose backward finds no others."""
    found = _own_static_address_type(value)
    return "unguarded" if found == "guarded" and (_recorder.get() is not None or is_whole_step()) else found


def _is_from_optimizer_source(source: Any) -> bool:
    """As Dynamo tells whether a tensor is reached through an optimizer, whose parameters are known by their addresses,
    so that gradients, and which tensors are the same, need no guards; what is recorded needs them, and a whole step."""
    return _recorder.get() is None and not is_whole_step() and _own_is_from_optimizer_source(source)


def _get_python_args(self: Any, *args: Any, **kwargs: Any) -> Any:
    """As Dynamo finds the arguments by which it initializes an optimizer's state."""
    found = _own_python_args(self, *args, **kwargs)
    recorder = _recorder.get()
    if recorder is not None:
        _, calls = recorder.optimizers.setdefault(self.source.name, (self.value, []))
        calls.append(noted_call(self.value, *found))
    return found


def _bypass_package(self: Any, reason: str = "", **kwargs: Any) -> None:
    """As Dynamo says that it cannot keep a frame, without a warning where the recorder says so."""
    recorder = _recorder.get()
    if recorder is None:
        _own_bypass(self, reason, **kwargs)
    else:
        recorder.refused = recorder.refused or reason
        self.package = None


def _reduce(self: Any, obj: Any) -> Any:
    """As torch reduces an object that guards refer to, but for what it forgets: whether a subclass's tensor requires a
    gradient, and its gradient; what an optimizer has besides groups and state; what a method that was replaced closes
    over. A gradient that no guard refers to is left out, as torch could not read the tensor again."""
    recorder = _recorder.get()
    if recorder is None:
        return _own_reduce(self, obj)
    ours = recorder.reduce(obj)
    if ours is not None:
        return ours
    if isinstance(obj, torch.optim.Optimizer):
        return _optimizer, (
            type(obj),
            {k: v if id(v) in self.guard_tree_values else None for k, v in vars(obj).items()},
        )
    made = _own_reduce(self, obj)
    if isinstance(obj, types.FunctionType):
        closes = obj.__closure__ is not None and id(obj.__closure__) in self.guard_tree_values
        forgotten = (
            isinstance(made, tuple) and made[0] is guards._Missing
        )  # releases from 2.15 on rebuild it themselves
        parts = (obj.__code__, obj.__module__, obj.__qualname__, obj.__defaults__, obj.__closure__)
        return (self._unpickle_nested_function, parts) if closes and forgotten else made
    if not isinstance(made, tuple) or made[0] not in (self._unpickle_tensor, self._unpickle_traceable_wrapper_subclass):
        return made
    grad = obj.grad if obj.is_leaf and id(obj.grad) in self.guard_tree_values else None
    if made[0] == self._unpickle_tensor:
        return made[0], (*made[1][:-1], grad)
    return _subclass, (*made, obj.requires_grad, grad)


def _lookup(*args: Any, **kwargs: Any) -> Any:
    """As AOTAutograd looks into its cache; what is recorded is traced anew, so that all that it depends on is seen."""
    return None if _recorder.get() is not None else _own_lookup(*args, **kwargs)


def _subclass(
    make: Callable[..., torch.Tensor], args: tuple[Any, ...], requires_grad: bool, grad: torch.Tensor | None
) -> torch.Tensor:
    made = make(*args)
    if requires_grad:
        made.requires_grad_()
    made.grad = grad
    return made


def _optimizer(kind: type, attributes: dict[str, Any]) -> Any:
    made = object.__new__(kind)
    vars(made).update(attributes)
    return made


def _compile(self: Any, frame: Any, cache_entry: Any, hooks: Any, frame_state: Any, *, skip: int = 0) -> Any:
    given = self, frame, cache_entry, hooks, frame_state
    if self._export or frame.f_code in convert_frame.output_codes or not convert_frame.has_tensor_in_frame(frame):
        return own_compile()(*given, skip=skip + 1)
    with compilation(_named(frame)) as made:
        try:
            found = (_answered if _handlers else _compiled)(*given, skip=skip + 2)
        except Exception as error:
            own = in_the_open(error, self._one_graph)
            if own is None:
                raise
            raise own from None
        made.made = made.made or found.guarded_code is not None
        return found


def _recompilation_reasons(*args: Any, **kwargs: Any) -> list[str]:
    """As Dynamo finds out why it compiles a frame again."""
    reasons = _own_reasons(*args, **kwargs)
    repeats(reasons)
    return reasons


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
            return _compiled(self, frame, cache_entry, hooks, frame_state, skip=skip + 1)
        token, own = _recorder.set(recorder), self._package
        self._package = recorder
        try:
            with _names_of_this_process(), functorch_config.patch(WHOLE):
                return own_compile()(self, frame, cache_entry, hooks, frame_state, skip=skip)
        finally:
            self._package = own
            _recorder.reset(token)


def _compiled(self: Any, frame: Any, cache_entry: Any, hooks: Any, frame_state: Any, *, skip: int) -> Any:
    with exchanging():
        return own_compile()(self, frame, cache_entry, hooks, frame_state, skip=skip)


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
    "Unsupported",
    "caches_are_on",
    "install",
    "intercept",
    "intercept_from_now_on",
    "no_longer",
    "settings",
]
