"""Private APIs of torch.compile: Dynamo, AOTAutograd and Inductor. See `core`, which checks the version of torch."""

import contextlib
import functools
import itertools
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import sympy
import torch

from .core import OpOverload, tree_map  # first: it checks the version of torch
from .symbolic_sizes import free_symbols

# isort: split
from torch._dynamo import guards as dynamo_guards
from torch._dynamo.exc import RestartAnalysis
from torch._functorch import config as functorch_config
from torch._guards import CompileContext, TracingContext
from torch._higher_order_ops.utils import unique_graph_id
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomInferenceAwareGraphPass, CustomPartitionerFn, get_hash_for_files
from torch._inductor.fx_passes.control_dependencies import control_deps, preserve_node_ordering
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, track_tensor_tree
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._ordered_set import OrderedSet


def static_placeholders(graph: torch.fx.Graph, static: Sequence[int]) -> list[torch.fx.Node]:
    """The placeholders of a joint graph that are parameters, buffers, or inner tensors of them.

    `static` contains indices of such arguments as Dynamo counts them, before subclasses are unwrapped.
    """
    from torch._functorch._aot_autograd.descriptors import BufferAOTInput, ParamAOTInput, PlainAOTInput

    def is_static(found: Any) -> bool:
        while hasattr(found, "base"):
            found = found.base
        plain = isinstance(found, PlainAOTInput) and found.idx in static
        return plain or isinstance(found, (BufferAOTInput, ParamAOTInput))

    return [node for node in graph.find_nodes(op="placeholder") if is_static(node.meta.get("desc"))]


def static_inputs() -> Sequence[int]:
    """Indices of the parameters and buffers in the current compilation, for `static_placeholders`."""
    context = TracingContext.try_get()
    return context.fw_metadata.static_input_indices if context is not None and context.fw_metadata else ()


class SizesSettled(RuntimeError):
    """A size that was a symbol when AOTAutograd inspected the results has become a number since: trace again."""


_known: ContextVar[int | None] = ContextVar("known", default=None)


def _numbers() -> int:
    """Number of symbols in the current compilation that have turned out to be numbers."""
    context = TracingContext.try_get()
    env = context.fake_mode.shape_env if context is not None and context.fake_mode is not None else None
    return sum(tgt.is_number for tgt in env.replacements.values()) if env is not None else 0


@contextlib.contextmanager
def traced_again_if_settled() -> Iterator[None]:
    """Context of a first trace, in which `check_settled` raises if a symbol has become a number since it began."""
    token = _known.set(_numbers())
    try:
        yield
    finally:
        _known.reset(token)


def check_settled() -> None:
    """Check, after a joint or inference graph was traced, that no size became a number during the trace.

    AOTAutograd may still count such a size of a result as a symbol, although it is not an output of the graph.

    Raises:
        SizesSettled: A size became a number. In another trace of the same program it is one from the start.
    """
    known = _known.get()
    if known is not None and _numbers() > known:
        raise SizesSettled("sizes became numbers while this was traced")


def check_results(joint: torch.fx.Graph, expected: int) -> None:
    """Check that a joint graph has the `expected` number of results in addition to its gradients.

    AOTAutograd counts the symbolic sizes of results before it traces the backward, and later takes them from the
    graph's outputs. If the backward turns one into a number (for example in a loop over a size), it is missing there.

    Raises:
        SizesSettled: A size is missing. In another trace of the same program these sizes are numbers from the start.
    """
    from torch._functorch._aot_autograd.descriptors import GradAOTOutput, SubclassGetAttrAOTOutput

    def is_gradient(found: Any) -> bool:
        while hasattr(found, "base"):
            found = found.base
        return isinstance(found, GradAOTOutput)

    # Inputs that are not tensors have None as gradient.
    described = joint.output_node().meta.get("desc") or ()
    results = [d for d in described if d is not None and not is_gradient(d)]
    if len(results) < expected and any(isinstance(d, SubclassGetAttrAOTOutput) for d in results):
        raise SizesSettled(
            "the backward turns a dynamic size into a number, after the forward was traced for any size; write "
            'torch.compile(…, backend="dtensor"), which traces again, or dynamic=False'
        )


@functools.cache
def parts_count_as_wholes(cls: type) -> None:
    """Make AOTAutograd derive its metadata of inner tensors from that of the outer tensors of the subclass `cls`.

    Otherwise it would trace the forward once more, a tenth of its work, only to count the inner tensors and find those
    that are written to. Also, if inner tensors of results are views of the same memory, it would count that memory as a
    result; but the final trace goes by the outer tensors, which are not views.

    AOTAutograd can then return the memory of results that are views of one another, which are plain tensors, beside
    subclasses: it refuses this, as it does not know the inner tensors of that memory.
    """
    from torch._functorch import aot_autograd
    from torch._functorch._aot_autograd import graph_capture, graph_capture_wrappers

    take_apart, collect = (
        graph_capture.aot_dispatch_subclass,
        graph_capture_wrappers.run_functionalized_fw_and_collect_metadata,
    )
    has_parts = aot_autograd.requires_subclass_dispatch
    outer: ContextVar[Any] = ContextVar("dtensor_outer_metadata", default=None)

    @functools.wraps(take_apart)
    def taken_apart(*args: Any, meta: Any, **kwargs: Any) -> Any:
        token = outer.set(meta)
        try:
            return take_apart(*args, meta=meta, **kwargs)
        finally:
            outer.reset(token)

    @functools.wraps(collect)
    def collected(*args: Any, static_input_indices: Any = None, **kwargs: Any) -> Callable[..., Any]:
        known = outer.get()
        if known is not None and _knows_parts(known, cls):
            return lambda *_: _of_parts(known, static_input_indices)
        traced = collect(*args, static_input_indices=static_input_indices, **kwargs)

        def counted(*inner: Any) -> Any:
            found = traced(*inner)
            if known is not None:
                found.num_intermediate_bases = known.num_intermediate_bases
            return found

        return counted

    @functools.wraps(has_parts)
    def refuses_views(args: Any, meta: Any) -> bool:
        return has_parts(args, meta) and not (meta.num_intermediate_bases and _knows_parts(meta, cls))

    aot_autograd.requires_subclass_dispatch = refuses_views
    graph_capture.aot_dispatch_subclass = taken_apart
    graph_capture_wrappers.run_functionalized_fw_and_collect_metadata = collected


def _knows_parts(meta: Any, cls: type) -> bool:
    """Whether the inner tensors of a graph's tensors are known, and all subclasses among them are `cls`.

    They are unknown if AOTAutograd has merged inputs that share memory. Freezing needs to know which results share
    memory, which the metadata of DTensors does not show.
    """
    if inductor_config.freezing or len(meta.subclass_inp_meta) != len(meta.input_info):
        return False
    metas = (*meta.subclass_inp_meta, *meta.subclass_fw_graph_out_meta)
    wholes = [m.original_subclass for m in metas if hasattr(m, "original_subclass")]
    return all(type(x) is cls for x in wholes)


def _of_parts(outer: Any, static: list[int]) -> Any:
    """AOTAutograd's metadata of the inner tensors, derived from that of the outer ones."""
    from torch._functorch._aot_autograd.schemas import OutputType

    given, made = outer.subclass_inp_meta, outer.subclass_fw_graph_out_meta
    counts, results = ([getattr(m, "arg_count", 1) for m in metas] for metas in (given, made))
    first = list(itertools.accumulate(counts, initial=0))
    written = outer.num_mutated_inp_runtime_indices
    returned = written + outer.num_outputs
    of_input = (OutputType.alias_of_input, OutputType.is_input)
    infos = [
        replace(info, base_idx=first[info.base_idx]) if info.output_type in of_input else info
        for info in outer.output_info
    ]
    return replace(  # the remaining fields follow from these
        outer,
        input_info=[info for info, n in zip(outer.input_info, counts, strict=True) for _ in range(n)],
        output_info=[info for info, n in zip(infos, results[written:returned], strict=True) for _ in range(n)],
        num_intermediate_bases=sum(results[returned:]),
        static_input_indices=static,
        traced_tangents=[],
        traced_tangents_descs=[],
        subclass_inp_meta=[],
        subclass_fw_graph_out_meta=[],
        subclass_tangent_meta=[],
    )


def aot_backend(
    partition: Any, forward_compiler: Any, inference_compiler: Any, backward_compiler: Any, decompositions: Any = None
) -> Any:
    """A Dynamo backend: AOTAutograd with `partition` for the joint graph, and with these compilers and
    decompositions."""
    from torch._dynamo.backends.common import aot_autograd

    return aot_autograd(
        fw_compiler=forward_compiler,
        inference_compiler=inference_compiler,
        bw_compiler=backward_compiler,
        partition_fn=partition,
        keep_inference_input_mutations=True,
        decompositions=decompositions,
    )


def inductor_compile(gm: Any, example_inputs: Any, config_patches: dict[str, Any]) -> Any:
    """Compile a Dynamo graph with Inductor, with its configuration patched for forward and backward.

    Since torch 2.14, Inductor may reorder collectives after the passes have ordered them. This is turned off: the new
    order would depend on the sizes of tensors on this rank, which for uneven shards differ from those on other ranks.
    """
    from torch._inductor.compile_fx import compile_fx

    if hasattr(inductor_config.aten_distributed_optimizations, "enable_simple_overlap"):
        config_patches = config_patches | {"aten_distributed_optimizations.enable_simple_overlap": False}
    return compile_fx(gm, example_inputs, config_patches=config_patches)


@functools.cache
def lower_as_collective(operator: OpOverload) -> None:
    """Make Inductor keep inputs of `operator` unchanged until the wait for its result, as for torch's collectives."""
    from torch._inductor.comm_lowering import _create_out_of_place
    from torch._inductor.lowering import add_layout_constraint, constrain_to_fx_strides, register_lowering

    add_layout_constraint(operator, constrain_to_fx_strides)
    register_lowering(operator)(functools.partial(_create_out_of_place, operator))


@functools.cache
def sizes_defined_by(operator: OpOverload, define: Callable[[ShapeEnv], dict[sympy.Symbol, tuple[Any, ...]]]) -> None:
    """Make Inductor's code first compute the sizes that cannot be read from the graph's inputs.

    Args:
        operator: Computes such a size from others. A call of it in a graph stands for the symbol of its result.
        define: Returns symbols -> the arguments of `operator` that compute them (sizes as expressions), in an order in
            which they can be computed.
    """
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.lowering import register_lowering
    from torch._inductor.virtualized import V

    own = PythonWrapperCodegen.codegen_inputs

    @functools.wraps(own)
    def codegen_inputs(self: Any) -> None:
        own(self)
        compiled: Any = V.graph
        known = define(compiled.sizevars.shape_env)
        given = list(self.get_graph_inputs().values())
        wanted, todo = set(), [s for node in compiled.module.graph.nodes for s in free_symbols(node.meta.get("val"))]
        while todo:
            symbol = todo.pop()
            # What an input has is not computed, and what that would be computed from may not be there.
            if symbol in known and symbol not in wanted and not _is_size_of(given, symbol):
                wanted.add(symbol)
                todo += known[symbol][0].free_symbols
        for symbol in [s for s in known if s in wanted]:
            size, *rest = known[symbol]
            arguments = ", ".join([self.codegen_sizevar(size), *map(repr, rest)])
            self.prefix.writeline(f"{symbol} = torch.ops.{operator}({arguments})")

    PythonWrapperCodegen.codegen_inputs = codegen_inputs
    register_lowering(operator)(lambda *_: sympy.sympify(V.graph.current_node.meta["val"]))


def _is_size_of(inputs: list[Any], symbol: sympy.Symbol) -> bool:
    """Whether Inductor can read `symbol` from one of the graph's inputs."""
    from torch._inductor.ir import TensorBox

    tensors = [x for x in inputs if isinstance(x, TensorBox)]
    return symbol in inputs or any(symbol in (*x.get_size(), *x.get_stride()) for x in tensors)


def is_within() -> bool:
    """Whether the graph that Inductor currently runs passes on is a branch or a loop body in another graph."""
    frame, found = sys._getframe(1), 0
    while frame is not None and found < 2:
        found += frame.f_code.co_name in ("_recursive_joint_graph_passes", "_recursive_post_grad_passes")
        frame = frame.f_back
    return found > 1


def order_after(graph: torch.fx.Graph, later: dict[torch.fx.Node, list[torch.fx.Node]]) -> None:
    """Make Inductor run each node after those listed for it, on which it does not depend."""
    trace_ordered()
    preserve_node_ordering(graph, {node: OrderedSet(earlier) for node, earlier in later.items()})


@functools.cache
def trace_ordered() -> None:
    """Make nodes ordered by `order_after` traceable again, with their order.

    Inductor traces the body of a `scan` or `map` again if it turns it into a loop; torch 2.13 has no rule for this.
    """
    if ProxyTorchDispatchMode in control_deps.python_key_table:
        return

    @control_deps.py_impl(ProxyTorchDispatchMode)
    def traced(mode: Any, *args: Any, **kwargs: Any) -> Any:
        _, ordered, *given = args
        _, name = unique_graph_id(mode, prefix="ordered")
        mode.tracer.root.register_module(name, ordered)
        proxies = tree_map(mode.tracer.unwrap_proxy, args)
        proxy = mode.tracer.create_proxy("call_function", control_deps, proxies, kwargs)
        return track_tensor_tree(ordered(*given, **kwargs), proxy, constant=None, tracer=mode.tracer)


def on_tangents(node: Any, change: Callable[[Any, list[Any]], None]) -> None:
    """Let `change` modify the tangents of a function that AOTAutograd compiled, in the backward of all its calls.

    Args:
        node: The autograd node of one call.
        change: Takes the autograd node of a call and the list of its tangents, and changes the list in place. A missing
            tangent is None after `leave_missing`, otherwise plain zeros.
    """
    compiled = node._forward_cls
    backward = compiled.backward

    def changed(ctx: Any, *args: Any) -> Any:
        in_a_list = len(args) == 1 and isinstance(args[0], list)
        tangents = args[0] if in_a_list else list(args)
        change(ctx, tangents)
        return backward(ctx, tangents) if in_a_list else backward(ctx, *tangents)

    compiled.backward = staticmethod(changed)


def leave_missing(node: Any) -> None:
    """Keep missing tangents of this call's backward as None, instead of zeros."""
    node.set_materialize_grads(False)


def boxed(function: Any) -> Any:
    """Mark a compiled graph as taking its arguments in a single list."""
    from functorch.compile import make_boxed_func

    return make_boxed_func(function)


@contextlib.contextmanager
def without_compile_caches() -> Any:
    """Context in which compilation neither reads nor writes the caches of Inductor and AOTAutograd."""
    from torch._functorch import config as functorch_config

    with (
        inductor_config.patch(fx_graph_cache=False, fx_graph_remote_cache=False),
        functorch_config.patch(enable_autograd_cache=False, enable_remote_autograd_cache=False),
    ):
        yield


TRACE_LOG = "torch.__trace"
"""The logger of the records that TORCH_TRACE collects, which have `metadata` and `payload`."""


def trace_artifact(name: str, payload: Callable[[], str]) -> None:
    """Add a text to the artifacts of the current compilation, for TORCH_TRACE and tlparse; made only when needed."""
    if CompileContext.try_get() is not None:
        torch._logging.trace_structured(
            "artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=payload
        )


def on_bytecode(hook: Callable[[Any, Any], None]) -> Any:
    """Call `hook` with the code of each function that Dynamo rewrites, and with the new code.

    Returns a handle with `remove()`.
    """
    from torch._dynamo.convert_frame import register_bytecode_hook

    return register_bytecode_hook(lambda code, new_code: hook(code, new_code))


@contextlib.contextmanager
def observed_graphs(
    dynamo: Callable[[Any], None], wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]]
) -> Any:
    """Context that observes all graphs that torch.compile makes, whatever the backend.

    Graphs that a compiler makes for itself while it is at work are not included, such as Inductor's for pattern
    matching.

    Args:
        dynamo: Called with each graph module that Dynamo passes to a backend.
        wrap: Takes a name and a function that AOTAutograd calls with a graph module, and returns a replacement for it.
            The names are "joint" (the partitioner), "forward", "backward" and "inference" (the compilers).
    """
    from torch._dynamo.output_graph import OutputGraph
    from torch._functorch import aot_autograd

    call, stage = OutputGraph.call_user_compiler, aot_autograd.aot_stage2_compile
    at_work = threading.local()

    def alone(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def work(*args: Any, **kwargs: Any) -> Any:
            at_work.now = True
            try:
                return function(*args, **kwargs)
            finally:
                at_work.now = False

        return work

    @functools.wraps(call)
    def call_user_compiler(self, gm: Any, example_inputs: Any) -> Any:
        dynamo(gm)
        return call(self, gm, example_inputs)

    @functools.wraps(stage)
    def stage2(
        state: Any,
        capture: Any,
        partition_fn: Any,
        fw_compiler: Any,
        bw_compiler: Any = None,
        inference_compiler: Any = None,
    ) -> Any:
        given = (partition_fn, fw_compiler, bw_compiler or fw_compiler, inference_compiler or fw_compiler)
        if not getattr(at_work, "now", False):
            given = map(wrap, ("joint", "forward", "backward", "inference"), map(alone, given))
        return stage(state, capture, *given)

    OutputGraph.call_user_compiler, aot_autograd.aot_stage2_compile = call_user_compiler, stage2
    try:
        yield
    finally:
        OutputGraph.call_user_compiler, aot_autograd.aot_stage2_compile = call, stage


def symbolic_sizes(wanted: bool) -> contextlib.AbstractContextManager[Any]:
    """Context in which sizes of tensors are symbols from the first compilation on, if `wanted`."""
    return torch._dynamo.config.patch(assume_static_by_default=not wanted)


def compile_quickly() -> None:
    """Leave out of compilations what costs time and changes no result, for tests.

    Dynamo measures the latency of guards, for which it flushes the CPU caches for each graph; those that it writes in
    Python it makes fast, for which it parses and prints each expression several times. AOTAutograd writes out each
    graph, also where nobody listens.
    """
    dynamo_guards.profile_guard_manager = lambda *_: 0.0
    common: Any = dynamo_guards.PyExprCSEPass
    common.count, common.replace = lambda *_: None, lambda _, expression: ([], expression)
    from torch._functorch._aot_autograd import graph_compile

    listened_to = [graph_compile.aot_joint_log, graph_compile.aot_graphs_log]
    for name, silent in (("_log_joint_graph", None), ("_log_fw_bw_graphs", (None, None))):
        own = getattr(graph_compile, name)
        if not hasattr(own, "__wrapped__"):
            setattr(graph_compile, name, _if_heard(own, silent, listened_to))


def _if_heard(own: Callable[..., Any], silent: Any, logs: list[logging.Logger]) -> Callable[..., Any]:
    """`own` where someone listens to `logs` or records traces; a function that returns `silent` elsewhere."""

    @functools.wraps(own)
    def logged(*args: Any) -> Any:
        heard = logging.getLogger(TRACE_LOG).handlers or any(log.isEnabledFor(logging.INFO) for log in logs)
        return own(*args) if heard else silent

    return logged


def compiler_settings() -> dict[Any, dict[str, Any]]:
    """The configurations of Dynamo, AOTAutograd and Inductor: module -> name -> value."""
    return {config: config.get_config_copy() for config in (torch._dynamo.config, functorch_config, inductor_config)}


def set_compiler_settings(settings: dict[Any, dict[str, Any]]) -> None:
    """Restore the configurations returned by `compiler_settings`; unchanged values are not touched."""
    for config, given in settings.items():
        now = config.get_config_copy()
        config.load_config({name: value for name, value in given.items() if now[name] is not value})


def dynamo_counters() -> dict[str, Any]:
    """Dynamo's counters: group -> name -> count."""
    from torch._dynamo.utils import counters

    return counters


def recompiled() -> int:
    """How many times Dynamo has compiled a function again, since it started or was reset."""
    from torch._dynamo.convert_frame import FRAME_COMPILE_COUNTER

    return sum([n - 1 for n in FRAME_COMPILE_COUNTER.values()])


__all__ = [
    "TRACE_LOG",
    "CustomInferenceAwareGraphPass",
    "CustomPartitionerFn",
    "RestartAnalysis",
    "SizesSettled",
    "aot_backend",
    "boxed",
    "check_results",
    "check_settled",
    "compile_quickly",
    "compiler_settings",
    "dynamo_counters",
    "get_hash_for_files",
    "inductor_compile",
    "inductor_config",
    "is_within",
    "leave_missing",
    "lower_as_collective",
    "observed_graphs",
    "on_bytecode",
    "on_tangents",
    "order_after",
    "parts_count_as_wholes",
    "recompiled",
    "set_compiler_settings",
    "sizes_defined_by",
    "static_inputs",
    "static_placeholders",
    "symbolic_sizes",
    "trace_artifact",
    "traced_again_if_settled",
    "without_compile_caches",
]
