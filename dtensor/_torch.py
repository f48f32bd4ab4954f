"""Everything of torch that is not public, in one place.

The rest of the library names no private part of torch: what a new release may move is found and mended here.
Importing this module checks the torch version and raises `ImportError` outside the supported range.
"""

import contextlib
import functools
import operator
import re
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

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
from torch._dynamo import register_backend
from torch._dynamo.source import ConstantSource
from torch._guards import CompileContext, TracingContext, detect_fake_mode
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomInferenceAwareGraphPass, CustomPartitionerFn, get_hash_for_files
from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
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
from torch._subclasses.functional_tensor import FunctionalTensor
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
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext, guard_or_false
from torch.nn.modules import linear_cross_entropy as _operators_of_torch_nn  # noqa: F401
from torch.optim.optimizer import _foreach_supported_types as optim_foreach_types
from torch.utils._foreach_utils import _foreach_supported_types as utils_foreach_types
from torch.utils._ordered_set import OrderedSet
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

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


def without_frame(func: OpOverload) -> Any:
    """What `func` calls: the same without a Python frame in between, which takes a fifth of a small operator's time."""
    return func._op if type(func) is OpOverload else func


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
    return a is b or bool(guard_or_false(a == b))


def hint(size) -> int:
    """The number behind a size: itself, or the example value of a SymInt (adds no guard)."""
    if isinstance(size, torch.SymInt):
        return int(size.node.hint if size.node.hint is not None else 8192)
    return int(size)


def size_formula(size) -> Any:
    """A size as a sympy expression; of a SymInt, in symbols that are called as the inputs they come from."""
    import sympy

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


def define_size(size: torch.SymInt, value: torch.SymInt) -> None:
    """Have graphs write `value`, which equals `size` and is made of other symbols, wherever `size` stands.

    Does nothing where `size` is no symbol of its own. Torch guards that both are equal.
    """
    symbol, expression = size.node.expr, value.node.expr
    if symbol.is_Symbol and symbol not in expression.free_symbols and hint(size) == hint(value):
        size.node.shape_env._set_replacement(symbol, expression, "size of a local tensor")


def min_cut_partition(gm, joint_inputs, **kwargs):
    """Torch's partitioner: the graphs of forward and backward, with least saved between them."""
    from functorch.compile import min_cut_rematerialization_partition

    forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
    _states_among_tensors(forward, backward)
    return forward, backward


def _states_among_tensors(forward: torch.fx.GraphModule, backward: torch.fx.GraphModule) -> None:
    """Put the saved states of random generators before saved meshes, and say what their operators give.

    Where checkpointing draws random numbers again, torch saves these states last. It takes what is saved to be tensors
    first and other objects, such as a DTensor's mesh, after them.
    """
    from torch._functorch._aot_autograd.graph_compile import is_opaque_node
    from torch._prims import rng_prims as rng

    draws = forward.graph.find_nodes(op="call_function", target=rng.run_and_save_rng_state)
    states = {user: draw for draw in draws for user in draw.users if user.args[1] == 0}
    output: Any = forward.graph.output_node()
    saved = list(output.args[0])
    places = [k for k, node in enumerate(saved) if node in states]
    if not places:
        return
    for draw in draws:
        parts = {user.args[1]: user.meta["val"] for user in draw.users}
        draw.meta["val"] = parts[0], parts.get(1)
    taken: dict[Any, torch.fx.Node] = {}
    for node in backward.graph.find_nodes(op="call_function", target=rng.run_with_rng_state):
        taken[node.args[0]] = node
    given = [node for node in backward.graph.find_nodes(op="placeholder") if node in taken]
    for k, state in zip(places, given, strict=True):
        taken[state].meta["val"] = states[saved[k]].meta["val"][1]
    first = places[0]
    while first and is_opaque_node(saved[first - 1]):
        first -= 1
    others, after = saved[first : places[0]], saved[places[-1] + 1 :]
    output.args = ((*saved[:first], *[saved[k] for k in places], *others, *after),)
    before = given[0]
    for _ in others:
        before = before.prev
    for state in given:
        before.prepend(state)
    forward.recompile()
    backward.recompile()


def static_placeholders(graph: torch.fx.Graph, static: Sequence[int]) -> list[torch.fx.Node]:
    """The placeholders of a joint graph that are parameters, buffers, or parts of them.

    `static` are indices of arguments as Dynamo counts them, which is before subclasses are taken apart.
    """
    from torch._functorch._aot_autograd.descriptors import BufferAOTInput, ParamAOTInput, PlainAOTInput

    def is_static(found: Any) -> bool:
        while hasattr(found, "base"):
            found = found.base
        plain = isinstance(found, PlainAOTInput) and found.idx in static
        return plain or isinstance(found, (BufferAOTInput, ParamAOTInput))

    return [node for node in graph.find_nodes(op="placeholder") if is_static(node.meta.get("desc"))]


def static_inputs() -> Sequence[int]:
    """Indices of the arguments that are parameters or buffers, of what is compiled now; as `static_placeholders`."""
    context = TracingContext.try_get()
    return context.fw_metadata.static_input_indices if context is not None and context.fw_metadata else ()


def aot_backend(partition, forward_compiler, inference_compiler, backward_compiler):
    """A Dynamo backend: AOTAutograd, `partition` of the joint graph, the graph compilers."""
    from torch._dynamo.backends.common import aot_autograd

    return aot_autograd(
        fw_compiler=forward_compiler,
        inference_compiler=inference_compiler,
        bw_compiler=backward_compiler,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )


def inductor_compile(gm, example_inputs, config_patches: dict) -> Any:
    """Inductor on a Dynamo graph, with its configuration patched for forward and backward."""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(gm, example_inputs, config_patches=config_patches)


@functools.cache
def lower_as_collective(operator: OpOverload) -> None:
    """Have Inductor leave what `operator` reads as it is until the wait for its result, as of torch's collectives."""
    from torch._inductor.comm_lowering import _create_out_of_place
    from torch._inductor.lowering import add_layout_constraint, constrain_to_fx_strides, register_lowering

    add_layout_constraint(operator, constrain_to_fx_strides)
    register_lowering(operator)(functools.partial(_create_out_of_place, operator))


def order_after(graph: torch.fx.Graph, later: dict[torch.fx.Node, list[torch.fx.Node]]) -> None:
    """Have Inductor run each node after those given for it, on which it does not depend."""
    preserve_node_ordering(graph, {node: OrderedSet(earlier) for node, earlier in later.items()})


def boxed(function):
    """Mark a graph callable as taking its arguments in one list."""
    from functorch.compile import make_boxed_func

    return make_boxed_func(function)


@contextlib.contextmanager
def without_compile_caches():
    """Inside, nothing compiled is taken from the caches of Inductor and AOTAutograd, nor put there."""
    from torch._functorch import config as functorch_config

    with (
        inductor_config.patch(fx_graph_cache=False, fx_graph_remote_cache=False),
        functorch_config.patch(enable_autograd_cache=False, enable_remote_autograd_cache=False),
    ):
        yield


def compile_context() -> Any:
    """What torch.compile works on in this thread: one object, with a `compile_id`, for all that is made of one frame,
    its backward included; None outside."""
    return CompileContext.try_get()


TRACE_LOG = "torch.__trace"
"""The logger to which torch writes what TORCH_TRACE collects: records with `metadata` and `payload`."""


def trace_artifact(name: str, payload: Callable[[], str]) -> None:
    """Put a text among the artefacts of what is being compiled, for TORCH_TRACE and tlparse; it is made if one asks."""
    if CompileContext.try_get() is not None:
        torch._logging.trace_structured(
            "artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=payload
        )


def on_bytecode(hook: Callable[[Any, Any], None]) -> Any:
    """Have `hook` called with the code of each function that Dynamo rewrites, and the new code; gives a handle with
    `remove()`."""
    from torch._dynamo.convert_frame import register_bytecode_hook

    return register_bytecode_hook(lambda code, new_code: hook(code, new_code))


@contextlib.contextmanager
def observed_graphs(dynamo: Callable[[Any], None], wrap: Callable[[str, Callable], Callable]):
    """Context in which all that torch.compile makes is shown, whatever the backend.

    What a compiler compiles for itself while it is at work, as Inductor does to match patterns, is not.

    Args:
        dynamo: called with each graph module that Dynamo hands to a backend.
        wrap: gives what stands for a function that AOTAutograd calls with a graph module: "joint" (the partitioner),
            "forward", "backward" and "inference" (the compilers of these graphs).
    """
    from torch._dynamo.output_graph import OutputGraph
    from torch._functorch import aot_autograd

    call, stage = OutputGraph.call_user_compiler, aot_autograd.aot_stage2_compile
    at_work = threading.local()

    def alone(function: Callable) -> Callable:
        @functools.wraps(function)
        def work(*args, **kwargs):
            at_work.now = True
            try:
                return function(*args, **kwargs)
            finally:
                at_work.now = False

        return work

    @functools.wraps(call)
    def call_user_compiler(self, gm, example_inputs):
        dynamo(gm)
        return call(self, gm, example_inputs)

    @functools.wraps(stage)
    def stage2(state, capture, partition_fn, fw_compiler, bw_compiler=None, inference_compiler=None):
        given = (partition_fn, fw_compiler, bw_compiler or fw_compiler, inference_compiler or fw_compiler)
        if not getattr(at_work, "now", False):
            given = map(wrap, ("joint", "forward", "backward", "inference"), map(alone, given))
        return stage(state, capture, *given)

    OutputGraph.call_user_compiler, aot_autograd.aot_stage2_compile = call_user_compiler, stage2
    try:
        yield
    finally:
        OutputGraph.call_user_compiler, aot_autograd.aot_stage2_compile = call, stage


def symbolic_sizes(wanted: bool) -> contextlib.AbstractContextManager:
    """Context in which sizes of tensors are symbols from the first compilation on, if that is wanted."""
    return torch._dynamo.config.patch(assume_static_by_default=not wanted)


def dynamo_counters() -> dict:
    """Dynamo's counters: group -> name -> count."""
    from torch._dynamo.utils import counters

    return counters


__all__ = [
    "OWN_KEYSET",
    "TRACE_LOG",
    "CustomInferenceAwareGraphPass",
    "CustomPartitionerFn",
    "FakeTensor",
    "FakeTensorMode",
    "FunctionalTensor",
    "MemberType",
    "OpOverload",
    "TorchDispatchMode",
    "UnknownValue",
    "aot_backend",
    "binary_products",
    "boxed",
    "c10d",
    "check_version",
    "compile_context",
    "current_device_mesh",
    "decompositions",
    "default_group_timeout",
    "default_store",
    "define_size",
    "detect_fake_mode",
    "disable_current_modes",
    "disable_dynamo",
    "disabled_torch_function",
    "dynamo_counters",
    "fake_store",
    "functional_collectives",
    "get_hash_for_files",
    "graph_node",
    "guards_hold",
    "guards_on",
    "has_hint",
    "hint",
    "inductor_compile",
    "inductor_config",
    "intercept",
    "is_being_compiled",
    "is_below_autograd",
    "is_in_formula",
    "is_in_graph",
    "lower_as_collective",
    "make_fx",
    "make_wrapper_subclass",
    "meets_only_autograd",
    "mesh_resources",
    "min_cut_partition",
    "never_traced",
    "observed_graphs",
    "on_bytecode",
    "operator_database",
    "optim_foreach_types",
    "order_after",
    "overloads_of",
    "process_groups",
    "real_object",
    "register_backend",
    "register_value_type",
    "register_work",
    "resolve_process_group",
    "return_and_correct_aliasing",
    "root_mesh",
    "same_size",
    "schema",
    "set_thread_state",
    "shard_order",
    "size_formula",
    "stand_in",
    "static_inputs",
    "static_placeholders",
    "strided_shard",
    "symbolic_mode",
    "symbolic_sizes",
    "thread_state",
    "threaded_process_group",
    "trace_artifact",
    "trace_with",
    "traced_into_backward",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
    "utils_foreach_types",
    "without_compile_caches",
    "without_frame",
    "without_own_key",
]
