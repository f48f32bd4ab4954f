"""Everything of torch that is not public: here of tensors, operators, process groups and traces.

`_torch_compile` has that of torch.compile, `_torch_fsdp` that of FSDP. The rest of the library names no private part of
torch: what a new release may move is found and mended in these three.
Importing this module checks the torch version and raises `ImportError` outside the supported range.
"""

import contextlib
import functools
import operator
import random
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import numpy
import sympy
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
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
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
    _sympy_handlers,
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    make_fx,
)
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
    ValueRangesSLoc,
    guard_or_false,
    statically_known_true,
)
from torch.nn.modules import linear_cross_entropy as _operators_of_torch_nn  # noqa: F401
from torch.optim.optimizer import _foreach_supported_types as optim_foreach_types
from torch.utils._foreach_utils import _foreach_supported_types as utils_foreach_types
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils._sympy.functions import CeilDiv, FloorDiv, Max, Min, Mod
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges
from torch.utils._thunk import Thunk

c10d = torch.ops._c10d_functional
"""The functional collectives: a start op and `wait_tensor`."""

register_work = torch._C._distributed_c10d._register_work  # pyright: ignore[reportAttributeAccessIssue]
"""Of a tensor and a work: `wait_tensor` of the tensor waits for the work, too."""

wait_tensors = getattr(c10d, "wait_tensors", None)
"""Waits for all that a coalesced start gave (since torch 2.15; before, each is waited for by itself)."""

UnknownValue = (DataDependentOutputException, DynamicOutputShapeException)
"""What fake tensors raise where a result depends on values."""

disable_dynamo = torch._disable_dynamo


def never_traced(function):
    """Have Dynamo pass over `function` and all it calls. Unlike `disable_dynamo` it costs nothing per call."""
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(function.__code__, skip)
    return function


disabled_torch_function = torch._C._disabled_torch_function_impl
is_alias_of = torch._C._is_alias_of  # pyright: ignore[reportAttributeAccessIssue]
make_wrapper_subclass = torch.Tensor._make_wrapper_subclass

# A dispatch key above autograd that DTensor carries and no other tensor does. Every operator falls through it
# (at no cost) but those that must be seen before torch takes them apart.
OWN_KEY = "TESTING_ONLY_GenericWrapper"
OWN_KEYSET = torch._C.DispatchKeySet(torch._C._dispatch_key_parse(OWN_KEY))
_fallthrough = torch.library.Library("_", "IMPL")
_fallthrough.fallback(torch.library.fallthrough_kernel, OWN_KEY)
_own = {space: torch.library.Library(space, "IMPL") for space in ("aten", "torch_nn")}


def intercept(name: str, kernel) -> None:
    """Run `kernel` in place of an operator (of aten, if no other namespace is named) that has a DTensor among its
    arguments."""
    space, _, base = name.rpartition("::")
    _own[space or "aten"].impl(base, kernel, OWN_KEY)


def without_own_key():
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


def fake_store():
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
def threaded_process_group():
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


def current_device_mesh():
    """The mesh of the innermost `with mesh:` block, or None."""
    stack = mesh_resources.mesh_stack
    return stack[-1] if stack else None


def root_mesh(mesh):
    """The mesh that `mesh` was sliced from; itself if it was not."""
    return mesh._get_root_mesh()


def real_object(x):
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
    return group._get_backend(group._device_types[0]).options._timeout


def process_groups() -> tuple:
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
def traced_into_backward():
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


def symbolic_mode() -> FakeTensorMode:
    """A mode for tracing with sizes that may be symbols; tensors that are no stand-ins become constants."""
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())


def stand_in(mode: FakeTensorMode, x: torch.Tensor, name: str, symbols: bool) -> torch.Tensor:
    """A fake tensor like `x`, an input called `name`; of which sizes above 1 are symbols, if that is wanted."""
    if not symbols:
        return mode.from_tensor(x, static_shapes=True)
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * x.dim())
    return mode.from_tensor(x, symbolic_context=context, source=ConstantSource(name))


def trace_with(mode: FakeTensorMode, function: Callable, *args: Any) -> torch.fx.GraphModule:
    """The graph of `function` on stand-ins of `mode`: what is left below autograd and dispatch."""
    with enable_python_dispatcher(), mode:
        gm = make_fx(function, tracing_mode="real")(*args)
    binary_products(gm.graph)
    gm.recompile()
    return gm


def binary_products(graph: torch.fx.Graph) -> None:
    """Write products of sizes as products of two, in place.

    Torch writes one of three as one operator.mul of three: interpreters refuse it, and code for it has the first two.
    """
    for node in graph.find_nodes(op="call_function", target=operator.mul):
        first, second, *others = node.args
        for other in others:
            values: list[Any] = [x.meta.get("val") if isinstance(x, torch.fx.Node) else x for x in (first, second)]
            with graph.inserting_before(node):
                part = graph.call_function(operator.mul, (first, second))
            part.meta.update(node.meta, val=None if None in values else operator.mul(*values))
            first, second = part, other
        node.args = first, second


def guards_on(mode: FakeTensorMode, sizes: Sequence[Any]) -> str:
    """What a trace took for granted of the symbols among `sizes`: code for `assert_guards`."""
    symbols = [size for size in sizes if isinstance(size, torch.SymInt)]
    return (mode.shape_env.produce_guards_expression(symbols) or "") if symbols and mode.shape_env else ""


def guards_hold(mode: FakeTensorMode, code: str, sizes: Sequence[Any]) -> bool:
    """Whether other sizes in the place of the symbols are as the trace took for granted; another trace guards that."""
    return not code or mode.shape_env is None or bool(mode.shape_env.evaluate_guards_expression(code, sizes))


def same_size(a, b) -> bool:
    """Whether two sizes are equal: of sizes that only the data tell, whether that is known anyhow."""
    if type(a) is int and type(b) is int:
        return a == b
    return a is b or bool(guard_or_false(a == b))


def hint(size) -> int:
    """The number behind a size: itself, or the example value of a SymInt (adds no guard)."""
    if isinstance(size, torch.SymInt):
        return int(size.node.hint if size.node.hint is not None else 8192)
    return int(size)


def size_formula(size) -> Any:
    """A size as a sympy expression; of a SymInt, in symbols that are called as the inputs they come from."""
    if not isinstance(size, torch.SymInt):
        return sympy.Integer(int(size))
    sources = size.node.shape_env.var_to_sources
    named = {s: str(sources[s][0].name) if sources.get(s) else str(s) for s in size.node.expr.free_symbols}
    found = {s: re.sub(r"^L\['(\w+)'\]|\.size\(\)\[(\d+)\]$", _tidied, name) for s, name in named.items()}
    return size.node.expr.xreplace({s: sympy.Symbol(n, positive=True, integer=True) for s, n in found.items()})


def _tidied(m: re.Match) -> str:
    return m[1] if m[1] is not None else f".size({m[2]})"


def has_hint(size) -> bool:
    """Whether a size is a number or has an example value: not so for sizes that depend on values."""
    return not isinstance(size, torch.SymInt) or size.node.hint is not None


def replace_size(size: torch.SymInt, value: int | torch.SymInt) -> None:
    """Have a trace write `value`, which equals `size`, wherever `size` stands, and take its example value.

    Does nothing where `size` is no symbol of its own.
    """
    symbol, expression = size.node.expr, value.node.expr if isinstance(value, torch.SymInt) else sympy.Integer(value)
    if symbol.is_Symbol and symbol not in expression.free_symbols:
        env = size.node.shape_env
        if expression.is_number and symbol in env.backed_var_to_val:
            env.backed_var_to_val[symbol] = expression  # it may have been assumed to be another one
        _kept_bounds(env).setdefault(symbol, env.var_to_range[symbol])
        env.var_to_range[symbol] = ValueRanges(0, int_oo)
        env.size_like.discard(symbol)  # or its bounds would be compared by another rule
        env._set_replacement(symbol, expression, "size of a local tensor")
    size.node._hint = value.node.hint if isinstance(value, torch.SymInt) else value


def _kept_bounds(env: ShapeEnv) -> dict[sympy.Symbol, ValueRanges]:
    """Symbol -> the bounds that it keeps, whatever a trace writes for it: what the trace assumes of that is not to be
    asserted of what it is given. Torch replaces a symbol again where what replaces it was replaced."""
    kept: dict[sympy.Symbol, ValueRanges] | None = vars(env).get("dtensor_bounds")
    if kept is None:
        kept = {}
        replace = env._set_replacement

        def replaced(a: sympy.Symbol, tgt: sympy.Expr, msg: str) -> None:
            replace(a, tgt, msg)
            if a in kept:
                env.var_to_range[a] = kept[a]

        vars(env).update(dtensor_bounds=kept, _set_replacement=replaced)
    return kept


def on_fixed_sizes(env: ShapeEnv, then: Callable[[], None]) -> None:
    """Have `then` called after a trace has learnt that a symbol is a number."""
    replace = env._set_replacement

    def replaced(a: sympy.Symbol, tgt: sympy.Expr, msg: str) -> None:
        replace(a, tgt, msg)
        if tgt.is_number:
            then()

    env._set_replacement = replaced


def size_of(like: torch.SymInt, expression: sympy.Expr) -> torch.SymInt:
    """The size that `expression` says in symbols of the same trace as `like`."""
    env = like.node.shape_env
    return torch.SymInt(SymNode(expression, env, int, _example(env, expression)))


def _example(env: ShapeEnv, expression: Any) -> int:
    return int(expression.xreplace(env.backed_var_to_val))


def define_strides(x: torch.Tensor) -> None:
    """Have symbolic strides of a fake tensor, made before its sizes were replaced, take the example values of these."""
    for step in x.stride():
        if isinstance(step, torch.SymInt):
            step.node._hint = _example(step.node.shape_env, step.node.expr)


def assumed_size(env: ShapeEnv, name: str, value: int, least: int) -> torch.SymInt:
    """A new symbol for a size of which a trace assumes that it is `value`, and never below `least`."""
    symbol = sympy.Symbol(f"s{env._generate_unique_id(name)}", positive=True, integer=True)
    env.backed_var_to_val[symbol] = sympy.Integer(value)
    env.var_to_sources[symbol] = []
    env.var_to_range[symbol] = ValueRanges(least, int_oo)
    here = env._get_sloc()
    env.var_to_range_sloc[symbol] = ValueRangesSLoc(here, here)
    return torch.SymInt(SymNode(symbol, env, int, value))


def guards_written_by(
    env: ShapeEnv, write: Callable[[sympy.Basic], sympy.Basic], unbounded: Collection[sympy.Symbol]
) -> None:
    """Have what a trace took for granted pass through `write` before it becomes code; `unbounded` symbols have no
    bounds there."""
    produce = env.produce_guards_verbose

    def written(*args: Any, guards: Any = None, **kwargs: Any) -> Any:
        taken = [g._replace(expr=write(g.expr)) for g in (env.guards if guards is None else guards)]
        ranges = {s: env.var_to_range[s] for s in unbounded if s in env.var_to_range}
        env.var_to_range.update(dict.fromkeys(ranges, ValueRanges(-int_oo, int_oo)))
        try:
            return produce(*args, guards=taken, **kwargs)
        finally:
            env.var_to_range.update(ranges)

    env.produce_guards_verbose = written


def known_true(env: ShapeEnv, condition: sympy.Basic) -> bool:
    """Whether a trace knows without another guard that `condition` holds."""
    return env._maybe_evaluate_static(condition) is sympy.true


def known_equal(a, b) -> bool:
    """Whether two sizes are equal; of symbolic ones, whether a trace knows that without another guard."""
    return statically_known_true(a == b)


# Torch rebuilds a size that it meets outside of what it traced, but for powers, as which sympy writes s * s.
_sympy_handlers()[sympy.Pow] = operator.pow


def traced_size(size: Any) -> Any:
    """A size that was worked out beside what is traced, as one that the graph knows how to compute.

    Otherwise arithmetic with it could be taken for the definition of its own symbols.
    """
    mode = get_proxy_mode()
    if mode is None or not isinstance(size, torch.SymInt) or size in mode.tracer.symnode_tracker:
        return size
    number = size.node.maybe_as_int()
    if number is not None:
        return number
    made = _traced(mode.tracer.sympy_expr_tracker, size.node.shape_env.replace(size.node.expr))
    return size if made is None else made


def _traced(known: Mapping[sympy.Symbol, Any], expr: Any) -> Any:
    """`expr` worked out anew from the symbols that a trace has, two operands at a time; None if one is missing."""
    if expr in known:
        return known[expr].value
    if expr.is_Integer:
        return int(expr)
    make = _ARITHMETIC.get(expr.func)
    args = [_traced(known, x) for x in expr.args]
    return None if make is None or None in args else functools.reduce(make, args)


_ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    sympy.Add: operator.add,
    sympy.Mul: operator.mul,
    sympy.Pow: lambda x, n: functools.reduce(operator.mul, [x] * n),
    FloorDiv: operator.floordiv,
    Mod: operator.mod,
    Max: torch.sym_max,
    Min: torch.sym_min,
}


class _FirstDefinitions(dict):
    def __setitem__(self, symbol: sympy.Symbol, value: Any) -> None:
        self.setdefault(symbol, value)


def keep_first_definitions() -> None:
    """Have the graph that is traced on this thread, if one is, write a symbol as it first did.

    Torch takes what came last: x + 1 of an x that was x - 1 is then what x is made from, and x - 1 is made from x.
    """
    mode = get_proxy_mode()
    if mode is not None and not isinstance(mode.tracer.sympy_expr_tracker, _FirstDefinitions):
        mode.tracer.sympy_expr_tracker = _FirstDefinitions(mode.tracer.sympy_expr_tracker)


def is_traced() -> bool:
    """Whether arithmetic with sizes is recorded in a graph on this thread."""
    return get_proxy_mode() is not None


def is_written(symbol: sympy.Symbol) -> bool:
    """Whether the graph that is traced on this thread can write `symbol`.

    What only a tangent tells is forgotten, and has to be computed: a forward that reads it there is none.
    """
    mode = get_proxy_mode()
    if mode is None:
        return True
    known = mode.tracer.sympy_expr_tracker
    if symbol in known and _is_of_tangent(known[symbol].proxy):
        del known[symbol]
        by_node: Any = mode.tracer.symnode_tracker.sym_node_dict
        for size in [size for size in by_node if size.expr == symbol]:
            del by_node[size]
    return symbol in known


def _is_of_tangent(proxy: Any) -> bool:
    """Whether what a trace knows a size by is the size of a tangent."""
    node = (proxy.force() if isinstance(proxy, Thunk) else proxy).node
    source = node.args[0] if node.op == "call_function" and node.args else node
    return isinstance(source, torch.fx.Node) and source.op == "placeholder" and source.name.startswith("tangents")


__all__ = [
    "OWN_KEYSET",
    "CeilDiv",
    "FakeTensor",
    "FakeTensorMode",
    "FloorDiv",
    "FunctionalTensor",
    "Max",
    "MemberType",
    "Min",
    "Mod",
    "OpOverload",
    "ShapeEnv",
    "TorchDispatchMode",
    "UnknownValue",
    "assumed_size",
    "backend_of",
    "below_autograd",
    "binary_products",
    "break_connections",
    "c10d",
    "check_version",
    "cloned_store",
    "current_device_mesh",
    "decompositions",
    "default_group_timeout",
    "default_store",
    "define_strides",
    "detect_fake_mode",
    "disable_current_modes",
    "disable_dynamo",
    "disable_proxy_modes_tracing",
    "disabled_torch_function",
    "fake_store",
    "functional_collectives",
    "functionalized",
    "graph_node",
    "guards_hold",
    "guards_on",
    "guards_written_by",
    "has_hint",
    "has_tangent",
    "hint",
    "in_forward_mode",
    "intercept",
    "is_being_compiled",
    "is_below_autograd",
    "is_gloo",
    "is_in_formula",
    "is_in_graph",
    "is_registered",
    "is_traced",
    "is_written",
    "keep_first_definitions",
    "known_equal",
    "known_true",
    "make_fx",
    "make_wrapper_subclass",
    "meets_only_autograd",
    "mesh_resources",
    "never_traced",
    "on_fixed_sizes",
    "operator_database",
    "operator_samples",
    "optim_foreach_types",
    "overloads_of",
    "process_groups",
    "real_object",
    "register_value_type",
    "register_work",
    "replace_size",
    "resolve_process_group",
    "return_and_correct_aliasing",
    "root_mesh",
    "same_size",
    "schema",
    "set_thread_state",
    "shard_order",
    "size_formula",
    "size_of",
    "stand_in",
    "strided_shard",
    "symbolic_mode",
    "thread_state",
    "threaded_process_group",
    "trace_with",
    "traced_into_backward",
    "traced_size",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
    "utils_foreach_types",
    "without_frame",
    "without_own_key",
]
