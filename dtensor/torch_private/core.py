"""Private torch APIs for tensors, operators, process groups and traces.

The other modules of this folder contain those for symbolic sizes, torch.compile, FSDP, state dicts and more. The rest
of the library uses no private part of torch, so changes in a new release are found and fixed here. Importing this
module checks the torch version and raises `ImportError` outside the supported range.
"""

import contextlib
import functools
import logging
import random
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

SUPPORTED = ((2, 13), (2, 16))
"""The supported torch releases: at least the first, below the second."""


def check_version(version: str) -> None:
    """Raise ImportError if `version` (such as "2.13.0+cpu") is outside `SUPPORTED`."""
    found = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    low, high = SUPPORTED
    if not low <= found < high:
        text = ".".join(map(str, low)), ".".join(map(str, high))
        raise ImportError(
            f"dtensor supports torch >={text[0]},<{text[1]} but torch {version} is installed; "
            f"write: pip install 'torch>={text[0]},<{text[1]}'"
        )


check_version(torch.__version__)

# Only now import what an unsupported release may not have.
from torch._decomp import decomposition_table as decompositions
from torch._guards import TracingContext, detect_fake_mode
from torch._library import opaque_object
from torch._library.custom_ops import CustomOpDef
from torch._library.fake_class_registry import FakeScriptObject
from torch._library.opaque_object import MemberType
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.autograd import forward_ad
from torch.distributed import _functional_collectives as functional_collectives
from torch.distributed import c10d_logger, distributed_c10d
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import _mesh_resources as mesh_resources
from torch.distributed.device_mesh import _register_distributed_opaque_types
from torch.distributed.distributed_c10d import (
    GroupName,
    ProcessGroup,
    _get_default_group,
    _get_default_store,
    _register_process_group,
    _resolve_process_group,
    _unregister_process_group,
)
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    make_fx,
)
from torch.nn.modules import linear_cross_entropy as _operators_of_torch_nn  # noqa: F401
from torch.optim.optimizer import _foreach_supported_types as optim_foreach_types
from torch.utils import _python_dispatch
from torch.utils._debug_mode import DebugMode as TorchDebugMode
from torch.utils._debug_mode import _OpCall as DebugOpCall
from torch.utils._debug_mode._utils import _tensor_debug_string as tensor_debug_string
from torch.utils._foreach_utils import _foreach_supported_types as utils_foreach_types
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode as current_dispatch_mode
from torch.utils._python_dispatch import (
    is_in_any_mode_without_ignore_compile_internals as in_mode_that_compiles_nothing,
)
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

_register_distributed_opaque_types()  # operators take meshes

c10d: Any = torch.ops._c10d_functional
"""The functional collectives: operators that start one, and `wait_tensor`."""

register_work = torch._C._distributed_c10d._register_work  # pyright: ignore[reportAttributeAccessIssue]
"""(tensor, work): makes `wait_tensor` of the tensor wait for the work, too."""

wait_tensors: Any = getattr(c10d, "wait_tensors", None)
"""Waits for all results of a coalesced start. Since torch 2.15; before that, each is waited for separately."""

UnknownValue: tuple[type[Exception], ...] = (DataDependentOutputException, DynamicOutputShapeException)
"""What fake tensors raise if a result depends on values."""

disable_dynamo: Any = torch._disable_dynamo

MODULE_CALL = nn.Module._call_impl.__code__
"""The code that runs when a module is called."""


@contextlib.contextmanager
def conjugates_resolved() -> Iterator[None]:
    """Context inside `__torch_dispatch__` in which operators resolve lazy conjugates and negatives, as outside."""
    left_out = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative):
        left_out = left_out.remove(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), left_out):
        yield


def function_transforms_active() -> bool:
    """Whether a transform of torch.func runs."""
    return torch._C._are_functorch_transforms_active()


def never_traced(function: Any) -> Any:
    """Make Dynamo skip `function` and everything that it calls, unless it is traced as part of its caller.

    Unlike `disable_dynamo`, this costs nothing per call.
    """
    return _passed_over(function, "SKIP")


def constant_in_traces(function: Any) -> Any:
    """Make Dynamo call `function` while it traces a call of it, and take the result for a constant.

    This is `torch.compiler.assume_constant_result`, which imports Dynamo.
    """
    function._dynamo_marked_constant = True
    return function


def traced_with_caller(function: Any) -> Any:
    """Make Dynamo trace `function` only as part of its caller; after a graph break, only the functions that it calls.

    Code that wraps users' functions would otherwise be compiled once for each of them, which Dynamo limits.
    """
    return _passed_over(function, "DEFAULT")


def _passed_over(function: Any, within: str) -> Any:
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    how = _FrameExecStrategy(_FrameAction.SKIP, getattr(_FrameAction, within))
    set_code_exec_strategy(function.__code__, how)
    return function


disabled_torch_function: Any = torch._C._disabled_torch_function_impl
is_alias_of = torch._C._is_alias_of  # pyright: ignore[reportAttributeAccessIssue]
make_wrapper_subclass: Any = torch.Tensor._make_wrapper_subclass

# A dispatch key above autograd that only DTensors have. All operators fall through it (at no cost), except those that
# must be intercepted before torch decomposes them.
OWN_KEY = "TESTING_ONLY_GenericWrapper"
OWN_KEYSET = torch._C.DispatchKeySet(torch._C._dispatch_key_parse(OWN_KEY))
_fallthrough = torch.library.Library("_", "IMPL")
_fallthrough.fallback(torch.library.fallthrough_kernel, OWN_KEY)
_own = {space: torch.library.Library(space, "IMPL") for space in ("aten", "torch_nn")}


def intercept(name: str, kernel: Any) -> None:
    """Run `kernel` instead of the operator `name` when one of its arguments is a DTensor.

    `name` is of aten unless it names another namespace.
    """
    space, _, base = name.rpartition("::")
    _own[space or "aten"].impl(base, never_traced(kernel), OWN_KEY)


def higher_order_operators() -> list[Any]:
    """Torch's operators that call functions: `cond`, `while_loop`, `scan` and the like."""
    return list(torch._ops._higher_order_ops.values())


def catch_higher_order(operator: Any, kernel: Callable[..., Any]) -> None:
    """Run `kernel(operator, ...)` instead of a higher-order operator when one of its arguments is a DTensor."""
    operator.py_impl(torch._C._dispatch_key_parse(OWN_KEY))(functools.partial(kernel, operator))


def without_own_key() -> Any:
    """Context in which `intercept` does not apply, to call the intercepted operator itself."""
    return torch._C._ExcludeDispatchKeyGuard(OWN_KEYSET)


_USUAL = torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.ADInplaceOrView
)


def meets_only_autograd() -> bool:
    """Whether only autograd is between `OWN_KEY` and `__torch_dispatch__`: no mode, transform or autocast."""
    return torch._C._dispatch_tls_local_include_set() == _USUAL and not torch._C._is_any_autocast_enabled()


def without_frame(func: OpOverload) -> Any:
    """What `func` calls, without the Python frame in between, which is a fifth of the time of a small operator."""
    return func._op if type(func) is OpOverload else func


_generated: Any = torch._C
BINDINGS = tuple(
    [getattr(_generated, name) for name in ("_VariableFunctions", "_nn", "TensorBase", "_linalg", "_special")]
)
"""Where torch's generated bindings are. They parse arguments in a third to two thirds of an operator's own time."""
OTHERS = {"_to_copy": functools.partial(_generated.TensorBase.to, copy=True)}
"""Operators that have no binding of their name -> a call of another one."""


class _Calls(TorchDispatchMode):
    """Notes the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, list[Any], Any]] = []

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.to.dtype:  # fake tensors take it whole, others take what it consists of
            with self:
                return func.decompose(*args, **(kwargs or {}))
        self.seen.append((func, *tree_flatten((args, kwargs or {}))))
        return func(*args, **(kwargs or {}))


def _calls_of(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Any, list[Any], Any]]:
    with _Calls() as calls:
        function(*args, **kwargs)
    return calls.seen


def fastest_binding(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What makes the call `func(*args, **kwargs)`, and nothing else, in the least time: torch's generated binding of
    the same name, or one of `OTHERS`, if it does, and otherwise `without_frame`.

    Whether it does is tried: give fake tensors.
    """
    usual = without_frame(func)
    if func.namespace != "aten":
        return usual
    name = func._schema.name.removeprefix("aten::")
    wanted = _calls_of(func, args, kwargs)
    named = [getattr(space, name) for space in BINDINGS if hasattr(space, name)]
    for binding in named or filter(None, [OTHERS.get(name)]):
        try:
            made = _calls_of(binding, args, kwargs)
        except (TypeError, RuntimeError):  # it takes its arguments in another way
            continue
        if len(made) == len(wanted) == 1 and _is_same(made[0], wanted[0]):
            return binding
    return usual


def _is_same(one: tuple[Any, list[Any], Any], other: tuple[Any, list[Any], Any]) -> bool:
    same = one[0] is other[0] and one[2] == other[2]
    return same and all(
        a is b or (type(a) is type(b) and not isinstance(a, torch.Tensor) and a == b) for a, b in zip(one[1], other[1])
    )


def register_value_type(cls: type, members: tuple[str, ...]) -> None:
    """Make Dynamo treat instances of the frozen class `cls` as constants; `members` are read at trace time."""
    kept = dict.fromkeys(members, MemberType.USE_REAL)
    register = getattr(opaque_object, "register_custom_class", None)
    if register is not None:  # since torch 2.15
        register(cls, typ="constant", members=kept)
    else:
        opaque_object.register_opaque_type(cls, typ="value", members=kept)


def fake_store() -> Any:
    """A store for the backend "fake". A testing tool of torch, imported on call."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


@functools.cache
def operator_database() -> dict[str, Any]:
    """Torch's `OpInfo`s by name, with the variant after a dot. A testing tool of torch, imported on call."""
    from torch.testing._internal.common_methods_invocations import op_db

    return {f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name: op for op in op_db}


def operator_samples(op: Any, dtype: torch.dtype, requires_grad: bool) -> Iterator[Any]:
    """The same samples as `op.sample_inputs` of an `OpInfo`, on the CPU. Changes the state of all global generators.

    `op.sample_inputs` formats the stack for each sample, to seed future devices and to find the calling test. That
    takes several times as long as running all the operators.
    """
    import numpy
    from torch.testing._internal.common_utils import SEED

    made = iter(op.sample_inputs_func(op, "cpu", dtype, requires_grad))
    while True:
        torch.default_generator.manual_seed(SEED)
        random.seed(SEED)
        numpy.random.seed(SEED)
        try:
            yield next(made)
        except StopIteration:
            return


def shard_order(x: Any) -> tuple[dict[int, tuple[int, ...]] | None, bool]:
    """For a DTensor of torch: what its spec says of the order in which mesh axes shard a dimension.

    Returns:
        Sharded dimension -> its axes, outermost first; None where strided shards state the order. And whether they do:
        in a view they state that its pieces are interleaved.
    """
    found = x._spec.shard_order
    is_order = bool(getattr(x._spec, "use_strided_shard_as_shard_order", found is None))
    return (None if found is None else {entry.tensor_dim: tuple(entry.mesh_dims) for entry in found}), is_order


def strided_shard(dim: int, strides: int) -> Any:
    """Torch's placement for an axis that shards `dim` after later axes split it into `strides`; imported on call."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=strides)


MODE_FLAGS = tuple([name for name in vars(_python_dispatch) if name.startswith("_is_in_")])
"""Names of the variables by which torch notes that a dispatch mode is active."""


@contextlib.contextmanager
def threaded_process_group() -> Any:
    """Context in which the threads of this process can be ranks of a process group with backend "threaded".

    A testing tool of torch, imported on call. Yields its class, whose `exception_handle` ends waiting collectives.

    Torch notes in variables of the process whether a dispatch mode is active. Threads overwrite what others put back,
    so that afterwards it would count as active, and Dynamo would compile nothing; the variables are put back here.
    """
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    noted = {name: getattr(_python_dispatch, name) for name in MODE_FLAGS}
    torch._C._distributed_c10d._set_thread_isolation_mode(True)  # pyright: ignore[reportAttributeAccessIssue]
    threaded._install_threaded_pg()
    try:
        yield threaded.ProcessLocalGroup
    finally:
        threaded.ProcessLocalGroup.reset()
        threaded._uninstall_threaded_pg()
        for name, value in noted.items():
            setattr(_python_dispatch, name, value)
        torch._C._distributed_c10d._set_thread_isolation_mode(False)  # pyright: ignore[reportAttributeAccessIssue]


def thread_state(name: str, default: Any) -> Any:
    """A thread-local object that autograd's threads inherit from the thread that called backward."""
    return torch._C._get_obj_in_tls(name) if torch._C._is_key_in_tls(name) else default


def set_thread_state(name: str, value: Any) -> None:
    """Set the object that `thread_state(name, …)` returns in this thread."""
    torch._C._stash_obj_in_tls(name, value)


def current_device_mesh() -> DeviceMesh | None:
    """The mesh of the innermost `with mesh:` block, or None."""
    stack = mesh_resources.mesh_stack
    return stack[-1] if stack else None


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that `mesh` was sliced from; `mesh` itself if it was not sliced."""
    return mesh._get_root_mesh()


def real_object(x: Any) -> Any:
    """The mesh behind its stand-in in a trace; `x` itself if it is not a stand-in, or if Dynamo traces this line."""
    return x.real_obj if not torch.compiler.is_dynamo_compiling() and isinstance(x, FakeScriptObject) else x


def schema(op: OpOverload) -> torch.FunctionSchema:
    """The schema of an operator: its arguments and results, and what it mutates and aliases."""
    return op._schema


def overloads_of(op: Any) -> list[OpOverload]:
    """The overloads of an operator, given as an overload, a packet or a result of `torch.library.custom_op`."""
    if isinstance(op, OpOverload):
        return [op]
    if isinstance(op, CustomOpDef):
        return [op._opoverload]
    if isinstance(op, OpOverloadPacket):
        return [getattr(op, name) for name in op.overloads()]
    return []


def default_store() -> Any:
    """The store of the default process group; None if there are no other processes to reach through it."""
    if not dist.is_initialized() or dist.get_backend() in ("fake", "threaded"):
        return None
    return _get_default_store()


def cloned_store(store: Any) -> Any:
    """The same store over a new connection, for another thread; the store itself if it cannot be cloned."""
    try:
        return store.clone()
    except RuntimeError:
        return store


_played: dict[str, str] = {}


def played_by_fakes(backend: str | None) -> None:
    """Let fake process groups count as groups of this backend, as `init_process_group` takes it; None: as fakes."""
    _played.clear()
    if backend is not None:
        config = dist.distributed_c10d.BackendConfig(cast(Any, dist.Backend(backend or "cpu:gloo,cuda:nccl")))
        _played.update(config.get_device_backend_map())


def backend_of(group: ProcessGroup, device_type: str) -> str:
    """Name of the backend that sends tensors of the device type in the group; "" if there is none."""
    pairs = [pair.partition(":") for pair in str(dist.get_backend_config(group)).split(",")]
    found = next((name for device, _, name in pairs if device == device_type), "")
    return _played.get(device_type, found) if found == "fake" else found


@contextlib.contextmanager
def quiet_fakes() -> Iterator[None]:
    """Do not log, inside, that an operator failed on fake tensors; it still raises."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def is_gloo(group: ProcessGroup, device_type: str) -> bool:
    """Whether gloo sends tensors of the device type in the group.

    A backend whose name ends in "gloo" counts, so that wrappers of gloo do, too ("counting-gloo").
    """
    return backend_of(group, device_type).endswith("gloo")


def _world() -> Any:
    """Torch's record of this rank's process groups. It is another object where threads are ranks."""
    return distributed_c10d._world


def is_registered(group: ProcessGroup) -> bool:
    """Whether the group is currently registered, not left over from process groups that were destroyed."""
    return group in _world().pg_names


def break_connections() -> None:
    """End every wait of this rank's process groups with an error. The groups are unusable afterwards.

    Other backends have `abort`. With gloo the only way is a timeout: it closes the connection on which one expires.
    """
    gloo: Any = dist.ProcessGroupGloo
    for group in list(_world().pg_names):
        for device in group._device_types:
            backend: Any = group._get_backend(device)
            if not isinstance(backend, gloo):
                with contextlib.suppress(RuntimeError):
                    backend.abort()
                continue
            for peer in range(backend.size()):
                if peer != backend.rank():
                    with contextlib.suppress(RuntimeError):
                        backend.recv([torch.empty(1)], peer, 0).wait(timedelta(milliseconds=1))


def on_lists_sent(check: Callable[[Any], None]) -> None:
    """Call `check` with each list of tensors that is given to a collective: the dispatcher does not look into lists of
    lists, so that no subclass in them hears of the call."""
    own = distributed_c10d._check_tensor_list

    @functools.wraps(own)
    def checked(param: Any, param_name: str) -> None:
        own(param, param_name)
        check(param)

    distributed_c10d._check_tensor_list = checked


class _ErrorsOfCollectives(logging.Handler):
    def __init__(self, explain: Callable[[RuntimeError], None]) -> None:
        super().__init__()
        self._explain = explain

    def handle(self, record: logging.LogRecord) -> bool:
        error = sys.exception()
        if isinstance(error, RuntimeError):
            self._explain(error)
        return True


def on_error_of_collective(explain: Callable[[RuntimeError], None]) -> None:
    """Call `explain` with each error in which a function of torch.distributed ends; what it raises takes its place.

    torch logs such errors while it handles them, and nothing else.
    """
    c10d_logger._c10d_logger.addHandler(_ErrorsOfCollectives(explain))


def default_group_timeout() -> timedelta:
    """How long a collective on the default process group may take."""
    group = _get_default_group()
    types = group._device_types  # none in a group of threads
    options = group._get_backend(types[0]).options if types else None
    return options._timeout if options is not None else default_pg_timeout  # a fake group has none


def process_groups() -> tuple[Any, ...]:
    """This rank, and the name, ranks and backends of each process group that it is in; empty without process groups."""
    if not dist.is_initialized():
        return ()
    groups = [
        (name, tuple(_world().pg_group_ranks[group]), str(_world().pg_backend_config[group]))
        for group, name in _world().pg_names.items()
    ]
    return dist.get_rank(), tuple(sorted(groups))


def names_of_this_rank() -> list[str]:
    """Names of process groups that other ranks may give to other groups: torch numbers them as they are made."""
    if not dist.is_initialized():
        return []
    return [name for group, name in _world().pg_names.items() if group is not dist.group.WORLD]


resolve_process_group: Callable[[str], ProcessGroup] = cast(Any, _resolve_process_group)
"""(name): the process group of that name."""


def register_alias(name: str, group: ProcessGroup) -> bool:
    """Give a process group a further name by which graphs can refer to it; False if another group has that name.

    The names of one group's ranks are the same that way, where torch numbers the groups that a rank is in.
    """
    try:
        found = resolve_process_group(name)
    except (RuntimeError, ValueError, KeyError):  # torch raises these for an unknown name
        found = None
    if found is not None and not is_registered(found):
        _unregister_process_group(GroupName(name))  # of process groups that were destroyed
        found = None
    if found is None:
        _register_process_group(GroupName(name), group)
    return found is None or found is group


def is_being_compiled() -> bool:
    """Whether torch.compile is at work on this thread: Dynamo propagates shapes, or AOTAutograd traces."""
    return TracingContext.try_get() is not None


def is_below_autograd() -> bool:
    """Whether the running operator has passed autograd, so that no version is counted and no gradient recorded."""
    return torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.ADInplaceOrView)


def in_forward_mode() -> bool:
    """Whether forward-mode differentiation is active."""
    return forward_ad._current_level >= 0


def has_tangent(x: torch.Tensor) -> bool:
    """Whether forward-mode differentiation is active and `x` has a tangent. Call it above autograd."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None


below_autograd: Callable[[], contextlib.AbstractContextManager[Any]] = torch._C._AutoDispatchBelowADInplaceOrView
"""Context in which autograd neither records nor counts versions, as inside `__torch_dispatch__`."""


def functionalized(x: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Context in which operators accept `x`, even after the trace in which functionalization made it."""
    return FunctionalTensorMode() if isinstance(x, FunctionalTensor) else contextlib.nullcontext()


def keep_while_traced(x: torch.Tensor) -> None:
    """Keep a tensor that functionalization made until it ends: `as_strided`, which could make it anew from another view
    of its memory, is not written to in a trace."""
    mode: Any = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL)
    if mode is not None and isinstance(x, FunctionalTensor):
        vars(mode).setdefault("dtensor_kept", []).append(x)


def after_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the backward that runs on this thread is done."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


@contextlib.contextmanager
def traced_into_backward() -> Any:
    """Context in which operators traced during a backward stay in the backward graph; no effect elsewhere."""
    meta = fx_traceback.current_meta
    if meta.get("partitioner_tag") != "is_backward":
        yield
        return
    meta["partitioner_tag"] = "must_be_in_backward"
    try:
        yield
    finally:
        meta["partitioner_tag"] = "is_backward"


eval_frame_callback: Callable[[], Any] = torch._C._dynamo.eval_frame.get_eval_frame_callback  # pyright: ignore
"""What Dynamo does with frames that run on this thread now; None or False where it leaves them alone."""


@never_traced
def is_in_backward() -> bool:
    """Whether a backward runs on this thread."""
    return torch._C._current_graph_task_id() != -1


def storage_of(x: torch.Tensor) -> int:
    """Which memory a tensor is in, also a fake one; valid while a tensor in it is alive."""
    return x.untyped_storage()._cdata  # pyright: ignore[reportReturnType]


def forward_number() -> int:
    """The number that autograd gives to the next operator of a forward."""
    return torch._C._autograd._get_sequence_nr()  # pyright: ignore[reportAttributeAccessIssue]


def backward_number() -> int | None:
    """The number of the operator of the forward whose backward runs on this thread; None outside of a backward."""
    node: Any = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def backward_run() -> int:
    """A number for the backward that runs on this thread, which no other one has."""
    return torch._C._current_graph_task_id()  # pyright: ignore[reportAttributeAccessIssue]


def is_in_formula() -> bool:
    """Whether the backward of one of torch's own operators runs on this thread, not that of an autograd function."""
    node = torch._C._current_autograd_node()
    return node is not None and not isinstance(node, torch.autograd.function.BackwardCFunction)


class AutogradNode(NamedTuple):
    """A node of autograd: its name, and the number that was current when it was made."""

    name: str
    sequence_number: int


def autograd_node() -> AutogradNode | None:
    """The node whose backward runs on this thread."""
    node = torch._C._current_autograd_node()
    return None if node is None else AutogradNode(node.name(), node._sequence_nr())


def next_sequence_number() -> int:
    """The number that autograd gives to the next node that it makes on this thread."""
    return torch.autograd._get_sequence_nr()


profiler_enabled: Callable[[], bool] = torch.autograd._profiler_enabled
"""Whether a profiler of torch records this thread."""


def is_in_graph() -> bool:
    """Whether operators on this thread are recorded in a graph."""
    return get_proxy_mode() is not None


def graph_node(x: torch.Tensor) -> torch.fx.Node | None:
    """The node that stands for `x` in the graph being traced; None if there is no graph or `x` is not in it."""
    mode = get_proxy_mode()
    if mode is None:
        return None
    if isinstance(x, FunctionalTensor):
        torch._sync(x)
        x = torch._from_functional_tensor(x.elem)
    slot = get_proxy_slot(x, mode.tracer, None)
    return None if slot is None else slot.proxy.node


def last_traced_node() -> torch.fx.Node | None:
    """The node that was added last to the graph that is being traced; None if there is no graph."""
    mode = get_proxy_mode()
    return None if mode is None else mode.tracer.graph._root.prev


assert_async: Any = torch._assert_async
"""(condition, message): raises once the condition is known, without waiting for a GPU. Traced, and never removed."""


__all__ = [
    "MODULE_CALL",
    "OWN_KEYSET",
    "AutogradNode",
    "DebugOpCall",
    "FakeTensor",
    "FakeTensorMode",
    "FunctionalTensor",
    "MemberType",
    "OpOverload",
    "OpOverloadPacket",
    "TorchDebugMode",
    "TorchDispatchMode",
    "UnknownValue",
    "assert_async",
    "autograd_node",
    "backend_of",
    "backward_run",
    "below_autograd",
    "break_connections",
    "c10d",
    "catch_higher_order",
    "check_version",
    "cloned_store",
    "conjugates_resolved",
    "constant_in_traces",
    "current_device_mesh",
    "current_dispatch_mode",
    "decompositions",
    "default_group_timeout",
    "default_store",
    "detect_fake_mode",
    "disable_current_modes",
    "disable_dynamo",
    "disable_proxy_modes_tracing",
    "disabled_torch_function",
    "eval_frame_callback",
    "fake_store",
    "fastest_binding",
    "functional_collectives",
    "functionalized",
    "graph_node",
    "has_tangent",
    "higher_order_operators",
    "in_forward_mode",
    "in_mode_that_compiles_nothing",
    "intercept",
    "is_being_compiled",
    "is_below_autograd",
    "is_gloo",
    "is_in_backward",
    "is_in_formula",
    "is_in_graph",
    "is_registered",
    "keep_while_traced",
    "last_traced_node",
    "make_fx",
    "make_wrapper_subclass",
    "meets_only_autograd",
    "mesh_resources",
    "names_of_this_rank",
    "never_traced",
    "next_sequence_number",
    "on_error_of_collective",
    "on_lists_sent",
    "operator_database",
    "operator_samples",
    "optim_foreach_types",
    "overloads_of",
    "played_by_fakes",
    "process_groups",
    "profiler_enabled",
    "quiet_fakes",
    "real_object",
    "register_alias",
    "register_value_type",
    "register_work",
    "resolve_process_group",
    "return_and_correct_aliasing",
    "root_mesh",
    "schema",
    "set_thread_state",
    "shard_order",
    "strided_shard",
    "tensor_debug_string",
    "thread_state",
    "threaded_process_group",
    "traced_into_backward",
    "traced_with_caller",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
    "utils_foreach_types",
    "without_frame",
    "without_own_key",
]
