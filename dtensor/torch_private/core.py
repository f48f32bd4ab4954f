"""Everything of torch that is not public: here of tensors, operators, process groups and traces.

`sizes` has that of symbolic sizes, `compiling` and `dynamo` that of torch.compile, `fsdp`
that of FSDP. The rest of the library names no private part of torch: what a new release may move is found and mended
in these five.
Importing this module checks the torch version and raises `ImportError` outside the supported range.
"""

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import numpy
import torch
import torch.distributed as dist

SUPPORTED = ((2, 13), (2, 16))
"""The supported torch releases: at least the first, below the second."""


def check_version(version: str) -> None:
    """Raise ImportError if `version` (such as "2.13.0+cpu") lies outside `SUPPORTED`."""
    found = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    low, high = SUPPORTED
    if not low <= found < high:
        text = ".".join(map(str, low)), ".".join(map(str, high))
        raise ImportError(
            f"dtensor supports torch >={text[0]},<{text[1]} but torch {version} is installed; "
            f"write: pip install 'torch>={text[0]},<{text[1]}'"
        )


check_version(torch.__version__)

# Only now what another release may not have.
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
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import _mesh_resources as mesh_resources
from torch.distributed.distributed_c10d import (
    GroupName,
    ProcessGroup,
    _get_default_group,
    _get_default_store,
    _resolve_process_group,
    _world,
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
from torch.utils._debug_mode import DebugMode as TorchDebugMode
from torch.utils._debug_mode import _OpCall as DebugOpCall
from torch.utils._debug_mode._utils import _tensor_debug_string as tensor_debug_string
from torch.utils._foreach_utils import _foreach_supported_types as utils_foreach_types
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

c10d: Any = torch.ops._c10d_functional
"""The functional collectives: a start op and `wait_tensor`."""

register_work = torch._C._distributed_c10d._register_work  # pyright: ignore[reportAttributeAccessIssue]
"""Of a tensor and a work: `wait_tensor` of the tensor waits for the work, too."""

wait_tensors: Any = getattr(c10d, "wait_tensors", None)
"""Waits for all that a coalesced start gave (since torch 2.15; before, each is waited for by itself)."""

UnknownValue: tuple[type[Exception], ...] = (DataDependentOutputException, DynamicOutputShapeException)
"""What fake tensors raise where a result depends on values."""

disable_dynamo: Any = torch._disable_dynamo


@contextlib.contextmanager
def conjugates_resolved() -> Iterator[None]:
    """Context inside `__torch_dispatch__` in which operators resolve lazy conjugates and negatives, as outside."""
    left_out = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative):
        left_out = left_out.remove(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), left_out):
        yield


def never_traced(function: Any) -> Any:
    """Have Dynamo pass over `function` and all it calls, where it is not traced as a part of its caller. Unlike
    `disable_dynamo` it costs nothing per call."""
    return _passed_over(function, "SKIP")


def traced_with_caller(function: Any) -> Any:
    """Have Dynamo trace `function` as a part of its caller alone, and where that broke the graph what it calls: code
    that stands around users' functions would be compiled for each, and a limit is set to that."""
    return _passed_over(function, "DEFAULT")


def _passed_over(function: Any, within: str) -> Any:
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    how = _FrameExecStrategy(_FrameAction.SKIP, getattr(_FrameAction, within))
    set_code_exec_strategy(function.__code__, how)
    return function


disabled_torch_function: Any = torch._C._disabled_torch_function_impl
is_alias_of = torch._C._is_alias_of  # pyright: ignore[reportAttributeAccessIssue]
make_wrapper_subclass: Any = torch.Tensor._make_wrapper_subclass

# A dispatch key above autograd that DTensor carries and no other tensor does. Every operator falls through it
# (at no cost) but those that must be seen before torch takes them apart.
OWN_KEY = "TESTING_ONLY_GenericWrapper"
OWN_KEYSET = torch._C.DispatchKeySet(torch._C._dispatch_key_parse(OWN_KEY))
_fallthrough = torch.library.Library("_", "IMPL")
_fallthrough.fallback(torch.library.fallthrough_kernel, OWN_KEY)
_own = {space: torch.library.Library(space, "IMPL") for space in ("aten", "torch_nn")}


def intercept(name: str, kernel: Any) -> None:
    """Run `kernel` in place of an operator (of aten, if no other namespace is named) that has a DTensor among its
    arguments."""
    space, _, base = name.rpartition("::")
    _own[space or "aten"].impl(base, never_traced(kernel), OWN_KEY)


def higher_order_operators() -> list[Any]:
    """Torch's operators that call functions: `cond`, `while_loop`, `scan` and the like."""
    return list(torch._ops._higher_order_ops.values())


def catch_higher_order(operator: Any, kernel: Callable[..., Any]) -> None:
    """Run `kernel(operator, ...)` in place of a higher-order operator that has a DTensor among its arguments."""
    operator.py_impl(torch._C._dispatch_key_parse(OWN_KEY))(functools.partial(kernel, operator))


def without_own_key() -> Any:
    """Context in which `intercept` does not apply, to call the intercepted operator itself."""
    return torch._C._ExcludeDispatchKeyGuard(OWN_KEYSET)


_USUAL = torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.ADInplaceOrView
)


def meets_only_autograd() -> bool:
    """Whether nothing but autograd is between `OWN_KEY` and `__torch_dispatch__`: no mode, transform or autocast."""
    return torch._C._dispatch_tls_local_include_set() == _USUAL and not torch._C._is_any_autocast_enabled()


_OF_LISTS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.cat.default: torch.cat,
    torch.ops.aten.stack.default: torch.stack,
}
"""Operators whose binding in `torch` takes a list of tensors in about half the time that the operator's own takes."""


def without_frame(func: OpOverload) -> Any:
    """What `func` calls: the same without a Python frame in between, which takes a fifth of a small operator's time."""
    return _OF_LISTS.get(func) or (func._op if type(func) is OpOverload else func)


def register_value_type(cls: type, members: tuple[str, ...]) -> None:
    """Let Dynamo treat instances of the frozen class `cls` as constants; `members` are read at trace time."""
    kept = dict.fromkeys(members, MemberType.USE_REAL)
    register = getattr(opaque_object, "register_custom_class", None)
    if register is not None:  # since torch 2.15
        register(cls, typ="constant", members=kept)
    else:
        opaque_object.register_opaque_type(cls, typ="value", members=kept)


def fake_store() -> Any:
    """The store of the process group "fake". A testing tool of torch, imported on call."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


@functools.cache
def operator_database() -> dict[str, Any]:
    """Torch's `OpInfo`s by name, the variant after a dot. A testing tool of torch, imported on call."""
    from torch.testing._internal.common_methods_invocations import op_db

    return {f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name: op for op in op_db}


def operator_samples(op: Any, dtype: torch.dtype, requires_grad: bool) -> Iterator[Any]:
    """The values of `op.sample_inputs` of an `OpInfo` on the CPU; changes the state of all global generators.

    That one formats the stack for each sample, to seed devices that may come and to find the test it is called from,
    which takes several times as long as all operators take to run.
    """
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


def shard_order(x: Any) -> dict[int, tuple[int, ...]] | None:
    """Of a DTensor of torch, for each dimension that is cut the mesh axes that cut it, outermost cut first.

    None where its strided shards are no order of cuts.
    """
    spec = x._spec
    found = spec.shard_order
    if found is None:
        found = type(spec)._maybe_convert_StridedShard_to_shard_order(spec.placements, spec.mesh)
    return None if found is None else {entry.tensor_dim: tuple(entry.mesh_dims) for entry in found}


def strided_shard(dim: int, strides: int) -> Any:
    """What torch calls an axis that cuts a dimension after later axes have cut it into `strides`; imported on call."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=strides)


@contextlib.contextmanager
def threaded_process_group() -> Any:
    """Context in which the threads of this process can be ranks of a process group with backend "threaded".

    A testing tool of torch, imported on call. Gives its class, whose `exception_handle` ends collectives that wait.
    """
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    torch._C._distributed_c10d._set_thread_isolation_mode(True)  # pyright: ignore[reportAttributeAccessIssue]
    threaded._install_threaded_pg()
    try:
        yield threaded.ProcessLocalGroup
    finally:
        threaded.ProcessLocalGroup.reset()
        threaded._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)  # pyright: ignore[reportAttributeAccessIssue]


def thread_state(name: str, default: Any) -> Any:
    """An object kept per thread that the threads of autograd take over from the one that called backward."""
    return torch._C._get_obj_in_tls(name) if torch._C._is_key_in_tls(name) else default


def set_thread_state(name: str, value: Any) -> None:
    """Set what `thread_state(name, …)` gives in this thread."""
    torch._C._stash_obj_in_tls(name, value)


def current_device_mesh() -> Any:
    """The mesh of the innermost `with mesh:` block, or None."""
    stack = mesh_resources.mesh_stack
    return stack[-1] if stack else None


def root_mesh(mesh: Any) -> Any:
    """The mesh that `mesh` was sliced from; itself if it was not."""
    return mesh._get_root_mesh()


def real_object(x: Any) -> Any:
    """What stands behind the stand-in that a mesh has while a graph is traced; `x` itself otherwise, and where Dynamo
    traces this very line."""
    return x.real_obj if not torch.compiler.is_dynamo_compiling() and isinstance(x, FakeScriptObject) else x


def schema(op: OpOverload) -> torch.FunctionSchema:
    """The schema of an operator: what it takes, returns, mutates and aliases."""
    return op._schema


def overloads_of(op: Any) -> list[OpOverload]:
    """The overloads of an operator, which is an overload, a packet or what `torch.library.custom_op` made."""
    if isinstance(op, OpOverload):
        return [op]
    if isinstance(op, CustomOpDef):
        return [op._opoverload]
    if isinstance(op, OpOverloadPacket):
        return [getattr(op, name) for name in op.overloads()]
    return []


def default_store() -> Any:
    """The store of the default process group; None where there are no other processes to meet there."""
    if not dist.is_initialized() or dist.get_backend() in ("fake", "threaded"):
        return None
    return _get_default_store()


def cloned_store(store: Any) -> Any:
    """The same store by a connection of its own, for another thread; the store itself if it has none to share."""
    try:
        return store.clone()
    except RuntimeError:
        return store


def backend_of(group: ProcessGroup, device_type: str) -> str:
    """The name of what carries tensors of the device in the group; "" for nothing."""
    pairs = [pair.partition(":") for pair in str(dist.get_backend_config(group)).split(",")]
    return next((name for device, _, name in pairs if device == device_type), "")


def is_gloo(group: ProcessGroup, device_type: str) -> bool:
    """Whether gloo carries tensors of the device in the group: by its backend's name, or the end of that of one around
    it ("counting-gloo")."""
    return backend_of(group, device_type).endswith("gloo")


def is_registered(group: ProcessGroup) -> bool:
    """Whether the group is one of the default group's world, and no relic of one that was destroyed."""
    return group in _world.pg_names


def break_connections() -> None:
    """End every wait of this rank's process groups with an error; they are of no use afterwards.

    Gloo closes a connection on which a time-out passes, and has nothing else to that end. Others have `abort`.
    """
    gloo: Any = dist.ProcessGroupGloo
    for group in list(_world.pg_names):
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


def default_group_timeout() -> timedelta:
    """How long a collective on the default process group may take."""
    group = _get_default_group()
    options = group._get_backend(group._device_types[0]).options
    return options._timeout if options is not None else default_pg_timeout  # a fake group has none


def process_groups() -> tuple[Any, ...]:
    """This rank, and the name, ranks and backends of each process group it is in; empty without any."""
    if not dist.is_initialized():
        return ()
    groups = [
        (name, tuple(_world.pg_group_ranks[group]), str(_world.pg_backend_config[group]))
        for group, name in _world.pg_names.items()
    ]
    return dist.get_rank(), tuple(sorted(groups))


def resolve_process_group(name: str) -> ProcessGroup:
    """The process group of that name."""
    return _resolve_process_group(GroupName(name))


def is_being_compiled() -> bool:
    """Whether torch.compile works on this thread: Dynamo's look at shapes, or a trace of AOTAutograd."""
    return TracingContext.try_get() is not None


def is_below_autograd() -> bool:
    """Whether autograd is done with the operator that runs: then no version is counted and no gradient recorded."""
    return torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.ADInplaceOrView)


def in_forward_mode() -> bool:
    """Whether forward-mode differentiation runs."""
    return forward_ad._current_level >= 0


def has_tangent(x: torch.Tensor) -> bool:
    """Whether forward-mode differentiation runs, and `x` carries a tangent of it. To be asked above autograd."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None


def below_autograd() -> contextlib.AbstractContextManager[Any]:
    """Context in which autograd neither records nor counts versions, as inside `__torch_dispatch__`."""
    return torch._C._AutoDispatchBelowADInplaceOrView()


def functionalized(x: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Context in which operators take `x`, also after the function was traced that functionalization made `x` in."""
    return FunctionalTensorMode() if isinstance(x, FunctionalTensor) else contextlib.nullcontext()


def after_backward(callback: Callable[[], None]) -> None:
    """Have `callback` called when the backward that runs on this thread is done."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


@contextlib.contextmanager
def traced_into_backward() -> Any:
    """Context in which what is traced during a backward stays in the backward graph; no effect elsewhere."""
    meta = fx_traceback.current_meta
    if meta.get("partitioner_tag") != "is_backward":
        yield
        return
    meta["partitioner_tag"] = "must_be_in_backward"
    try:
        yield
    finally:
        meta["partitioner_tag"] = "is_backward"


@never_traced
def is_in_backward() -> bool:
    """Whether a backward runs on this thread."""
    return torch._C._current_graph_task_id() != -1


def is_in_formula() -> bool:
    """Whether the backward of one of torch's own operators runs on this thread, not of a user's autograd function."""
    node = torch._C._current_autograd_node()
    return node is not None and not isinstance(node, torch.autograd.function.BackwardCFunction)


def is_in_graph() -> bool:
    """Whether what runs on this thread is recorded in a graph."""
    return get_proxy_mode() is not None


def graph_node(x: torch.Tensor) -> torch.fx.Node | None:
    """The node that stands for `x` in the graph being traced; None if there is no such graph, or `x` not in it."""
    mode = get_proxy_mode()
    if mode is None:
        return None
    if isinstance(x, FunctionalTensor):
        torch._sync(x)
        x = torch._from_functional_tensor(x.elem)
    slot = get_proxy_slot(x, mode.tracer, None)
    return None if slot is None else slot.proxy.node


assert_async: Any = torch._assert_async
"""(condition, message): raises when the condition is known; a GPU is not waited for. Traced, and never dropped."""


__all__ = [
    "OWN_KEYSET",
    "DebugOpCall",
    "FakeTensor",
    "FakeTensorMode",
    "FunctionalTensor",
    "MemberType",
    "OpOverload",
    "TorchDebugMode",
    "TorchDispatchMode",
    "UnknownValue",
    "assert_async",
    "backend_of",
    "below_autograd",
    "break_connections",
    "c10d",
    "catch_higher_order",
    "check_version",
    "cloned_store",
    "conjugates_resolved",
    "current_device_mesh",
    "decompositions",
    "default_group_timeout",
    "default_store",
    "detect_fake_mode",
    "disable_current_modes",
    "disable_dynamo",
    "disable_proxy_modes_tracing",
    "disabled_torch_function",
    "fake_store",
    "functional_collectives",
    "functionalized",
    "graph_node",
    "has_tangent",
    "higher_order_operators",
    "in_forward_mode",
    "intercept",
    "is_being_compiled",
    "is_below_autograd",
    "is_gloo",
    "is_in_backward",
    "is_in_formula",
    "is_in_graph",
    "is_registered",
    "make_fx",
    "make_wrapper_subclass",
    "meets_only_autograd",
    "mesh_resources",
    "never_traced",
    "operator_database",
    "operator_samples",
    "optim_foreach_types",
    "overloads_of",
    "process_groups",
    "real_object",
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
