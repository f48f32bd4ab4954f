"""Private torch APIs for symbolic sizes: what a trace knows and assumes about them, guards, and writes into its graph.

See `core`, which checks the version of torch. Nothing here imports sympy before a trace has a symbol.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from .core import FakeTensorMode, tree_leaves  # first: it checks the version of torch
from .on_demand import symbolic_shapes, sympy, value_ranges, when_imported

# isort: split
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental import _config as symbolic_config
from torch.fx.experimental.proxy_tensor import _sympy_handlers, _SympyExprTrackerValue, get_proxy_mode, make_fx
from torch.fx.experimental.sym_node import SymNode
from torch.utils._thunk import Thunk


def symbolic_mode() -> FakeTensorMode:
    """A mode for tracing with sizes that can be symbols; tensors that are not fake become constants."""
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=symbolic_shapes.ShapeEnv())


def stand_in(mode: FakeTensorMode, x: torch.Tensor, name: str, symbols: bool) -> torch.Tensor:
    """A fake tensor like `x`, an input called `name`. With `symbols`, its sizes above 1 are symbols."""
    if not symbols:
        return mode.from_tensor(x, static_shapes=True)
    from torch._dynamo.source import ConstantSource

    context = symbolic_shapes.StatelessSymbolicContext(dynamic_sizes=[symbolic_shapes.DimDynamic.DYNAMIC] * x.dim())
    return mode.from_tensor(x, symbolic_context=context, source=ConstantSource(name))


def trace_with(mode: FakeTensorMode, function: Callable[..., Any], *args: Any) -> torch.fx.GraphModule:
    """The graph of `function` on fake tensors of `mode`: what remains below autograd and dispatch."""

    def run(*given: Any) -> Any:
        sizes_before_strides(given)
        return function(*given)

    with enable_python_dispatcher(), mode:
        gm = make_fx(run, tracing_mode="real")(*args)
    binary_products(gm.graph)
    gm.recompile()
    return gm


def binary_products(graph: torch.fx.Graph) -> None:
    """Rewrite products of several sizes as products of two, in place.

    Torch writes a product of three as one operator.mul with three arguments. Interpreters refuse it, and code generated
    for it uses only the first two.
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
    """The guards of a trace on the symbols among `sizes`, as code for `guards_hold`; "" if there are none."""
    symbols = [size for size in sizes if isinstance(size, torch.SymInt)]
    return (mode.shape_env.produce_guards_expression(symbols) or "") if symbols and mode.shape_env else ""


def guards_hold(mode: FakeTensorMode, code: str, sizes: Sequence[Any]) -> bool:
    """Whether `sizes`, in place of the symbols, satisfy the guards. If they are symbols, their trace guards that."""
    return not code or mode.shape_env is None or bool(mode.shape_env.evaluate_guards_expression(code, sizes))


def same_size(a: Any, b: Any) -> bool:
    """Whether two sizes are equal; for data-dependent sizes, whether they are known to be."""
    if type(a) is int and type(b) is int:
        return a == b
    return a is b or bool(symbolic_shapes.guard_or_false(a == b))


def differ(a: Any, b: Any) -> bool:
    """Whether two sizes are different; for data-dependent sizes, whether they are known to be."""
    if type(a) is int and type(b) is int:
        return a != b
    return a is not b and bool(symbolic_shapes.guard_or_false(a != b))


def hint(size: Any) -> int:
    """The size as a number: itself, or the example value of a SymInt, 8192 if it has none. Adds no guard."""
    if isinstance(size, torch.SymInt):
        return int(size.node.hint if size.node.hint is not None else 8192)
    return int(size)


def size_formula(size: Any) -> Any:
    """A size as a sympy expression. The symbols of a SymInt are named after the inputs that they come from."""
    if not isinstance(size, torch.SymInt):
        return sympy.Integer(int(size))
    sources = size.node.shape_env.var_to_sources
    named = {s: str(sources[s][0].name) if sources.get(s) else str(s) for s in size.node.expr.free_symbols}
    found = {s: re.sub(r"^L\['(\w+)'\]|\.size\(\)\[(\d+)\]$", _tidied, name) for s, name in named.items()}
    return size.node.expr.xreplace({s: sympy.Symbol(n, positive=True, integer=True) for s, n in found.items()})


def _tidied(m: re.Match) -> str:
    return m[1] if m[1] is not None else f".size({m[2]})"


def number_if_known(size: Any) -> Any:
    """The number that a size has turned out to be; the size itself if it is still symbolic."""
    known = size.node.maybe_as_int() if isinstance(size, torch.SymInt) else None
    return size if known is None else known


def number_if_guarded(size: Any) -> Any:
    """Like `number_if_known`, and also if guards imply the value of a formula whose symbols are not numbers themselves.

    What a trace only assumes about its symbols does not count.
    """
    found = number_if_known(size)
    if not isinstance(found, torch.SymInt) or found.node.expr.is_Symbol or not has_hint(found):
        return found
    env, expr = found.node.shape_env, found.node.expr
    given = all(env.var_to_sources.get(s) for s in expr.free_symbols)
    return hint(found) if given and known_true(env, sympy.Eq(expr, hint(found))) else found


def write_numbers(env: symbolic_shapes.ShapeEnv) -> int:
    """Make a trace replace each input symbol whose bounds have met by the number.

    Torch does this only when it next evaluates the symbol. Returns how many symbols have been replaced so far.
    """
    for symbol, bounds in list(env.var_to_range.items()):
        if (
            bounds.is_int
            and bounds.is_singleton()
            and symbol not in env.replacements
            and env.var_to_sources.get(symbol)
        ):
            env._set_replacement(symbol, sympy.Integer(bounds.lower), "bounds have met")
    return len(env.replacements)


def has_hint(size: Any) -> bool:
    """Whether a size is a number or has an example value. Data-dependent sizes do not."""
    return not isinstance(size, torch.SymInt) or size.node.hint is not None


def guard_at_most_example(size: torch.SymInt) -> None:
    """Guard that a size is at most its example value; the program is traced again for a larger one."""
    bool(size <= hint(size))


def replace_size(size: torch.SymInt, value: int | torch.SymInt) -> None:
    """Make a trace write `value`, which is equal, in place of `size`, and use its example value.

    If `size` is not a single symbol, only the example value changes.
    """
    symbol, expression = size.node.expr, value.node.expr if isinstance(value, torch.SymInt) else sympy.Integer(value)
    if symbol.is_Symbol and symbol not in expression.free_symbols:
        env = size.node.shape_env
        _kept_bounds(env).setdefault(symbol, env.var_to_range[symbol])
        env.size_like.discard(symbol)  # otherwise its bounds would be compared by another rule
        env._set_replacement(symbol, expression, "size of a local tensor")
        if symbol in env.pending_fresh_unbacked_symbols:  # torch expects it in the results, but views lack it
            env.pending_fresh_unbacked_symbols.remove(symbol)
    size.node._hint = value.node.hint if isinstance(value, torch.SymInt) else value


def _kept_bounds(env: symbolic_shapes.ShapeEnv) -> dict[sympy.Symbol, value_ranges.ValueRanges]:
    """Symbol -> the bounds that it keeps when a trace replaces it.

    What the trace assumes about the replacement must not be asserted of its inputs. Torch replaces a symbol again when
    its replacement is replaced, so the bounds are restored on every replacement.
    """
    kept: dict[sympy.Symbol, value_ranges.ValueRanges] | None = vars(env).get("dtensor_bounds")
    if kept is None:
        kept = {}
        replace = env._set_replacement

        def replaced(a: sympy.Symbol, tgt: sympy.Expr, msg: str) -> None:
            if a in kept:
                env.var_to_range[a] = value_ranges.ValueRanges(0, value_ranges.int_oo)
                if tgt.is_number and a in env.backed_var_to_val:
                    env.backed_var_to_val[a] = sympy.Integer(tgt)  # another value may have been assumed
            replace(a, tgt, msg)
            if a in kept:
                env.var_to_range[a] = kept[a]

        vars(env).update(dtensor_bounds=kept, _set_replacement=replaced)
    return kept


def on_replaced_sizes(
    env: symbolic_shapes.ShapeEnv,
    check: Callable[[sympy.Basic], None],
    number: Callable[[], None],
    other: Callable[[], None],
) -> None:
    """Install callbacks for when a trace replaces a symbol.

    Args:
        env: The ShapeEnv of the trace.
        check: Called before a symbol is replaced by a number, with the condition that they are equal.
        number: Called after a symbol has been replaced by a number.
        other: Called after a symbol has been replaced by an expression of other symbols.
    """
    replace = env._set_replacement

    def replaced(a: sympy.Symbol, tgt: sympy.Expr, msg: str) -> None:
        before = env.replacements.get(a)
        if tgt.is_number:
            check(_are_equal(a, tgt))
        if env.replacements.get(a) == before:
            replace(a, tgt, msg)
        if env.replacements.get(a) != before:
            (number if tgt.is_number else other)()

    env._set_replacement = replaced


@functools.cache
def offsets_stand_alone() -> None:
    """Let no trace take the place of a tensor in its storage for equal to a size of the same value.

    This place depends on the rank where inputs are parts of larger tensors, and with it when a rank compiles again.
    """
    from torch._dynamo.source import TensorProperty

    own, duck = symbolic_shapes.ShapeEnv.create_symbol, symbolic_shapes.DimDynamic.DUCK

    @functools.wraps(own)
    def create_symbol(self: Any, val: Any, source: Any, dynamic_dim: Any = duck, *args: Any, **kwargs: Any) -> Any:
        if dynamic_dim is duck and getattr(source, "prop", None) is TensorProperty.STORAGE_OFFSET:
            dynamic_dim = symbolic_shapes.DimDynamic.DYNAMIC
        return own(self, val, source, dynamic_dim, *args, **kwargs)

    symbolic_shapes.ShapeEnv.create_symbol = create_symbol


def size_of(like: torch.SymInt, expression: sympy.Expr) -> torch.SymInt:
    """The size given by `expression`, in symbols of the same trace as `like`."""
    env = like.node.shape_env
    return torch.SymInt(SymNode(expression, env, int, _example(env, expression)))


def _example(env: symbolic_shapes.ShapeEnv, expression: Any) -> int:
    return int(expression.xreplace(env.backed_var_to_val))


def define_strides(x: torch.Tensor) -> None:
    """Update the example values of a fake tensor's symbolic strides, made before its sizes were replaced, to these."""
    for step in x.stride():
        if isinstance(step, torch.SymInt):
            step.node._hint = _example(step.node.shape_env, step.node.expr)


def assumed_size(env: symbolic_shapes.ShapeEnv, name: str, value: int, least: int) -> torch.SymInt:
    """A new symbol for a size. The trace assumes that its value is `value` and that it is never below `least`."""
    symbol = sympy.Symbol(f"s{env._generate_unique_id(name)}", positive=True, integer=True)
    env.backed_var_to_val[symbol] = sympy.Integer(value)
    env.var_to_sources[symbol] = []
    env.var_to_range[symbol] = value_ranges.ValueRanges(least, value_ranges.int_oo)
    here = env._get_sloc()
    env.var_to_range_sloc[symbol] = symbolic_shapes.ValueRangesSLoc(here, here)
    _kept_bounds(env)[symbol] = env.var_to_range[symbol]
    return torch.SymInt(SymNode(symbol, env, int, value))


def _are_equal(expression: sympy.Basic, number: sympy.Basic) -> sympy.Basic:
    """The condition that a size is a number, unevaluated.

    Sympy assumes that symbols of sizes are positive and would conclude that none is 0, but a local length can be 0.
    """
    return sympy.Eq(expression, number, evaluate=False)


def around_guards(
    env: symbolic_shapes.ShapeEnv,
    symbols: Collection[sympy.Symbol],
    check: Callable[[sympy.Basic], None],
    compared: Callable[[sympy.Basic], None],
) -> None:
    """Call `check` with each condition on `symbols` that a trace is about to guard, as it holds for the example values,
    and `compared` with each comparison of other sizes, once it is guarded.

    `check` may turn symbols into numbers; the trace then evaluates the condition for these.
    """
    evaluate = env._evaluate_expr

    def checked(orig_expr: sympy.Basic, hint: Any = None, *args: Any, **kwargs: Any) -> sympy.Basic:
        if orig_expr.free_symbols.isdisjoint(symbols):
            value = evaluate(orig_expr, hint, *args, **kwargs)
            if isinstance(orig_expr, (sympy.Eq, sympy.Ne)):
                compared(orig_expr)
            return value
        known = env._suppress_guards_tls() or not orig_expr.free_symbols <= env.backed_var_to_val.keys()
        if not known and env._maybe_evaluate_static(orig_expr) is None:
            value = sympy.sympify(orig_expr.xreplace(env.backed_var_to_val))
            says = {sympy.true: orig_expr, sympy.false: sympy.Not(orig_expr)}
            check(says[value] if value in says else _are_equal(orig_expr, value))
        return evaluate(orig_expr, None, *args, **kwargs)

    env._evaluate_expr = checked


def guards_written_by(
    env: symbolic_shapes.ShapeEnv, write: Callable[[sympy.Basic], sympy.Basic], unbounded: Collection[sympy.Symbol]
) -> None:
    """Pass each guard of a trace through `write` before code is generated for it.

    Symbols in `unbounded` have no bounds in that code. Compiled code that is kept in a cache has its guards on the
    sizes that it is called with, and loses others; those that `write` states in such sizes are kept as well.
    """
    produce = env.produce_guards_verbose

    def written(*args: Any, guards: Any = None, **kwargs: Any) -> Any:
        taken = [g._replace(expr=write(g.expr)) for g in env.guards] if guards is None else guards
        ranges = {s: env.var_to_range[s] for s in unbounded if s in env.var_to_range}
        env.var_to_range.update(
            dict.fromkeys(ranges, value_ranges.ValueRanges(-value_ranges.int_oo, value_ranges.int_oo))
        )
        try:
            return produce(*args, guards=taken, **kwargs)
        finally:
            env.var_to_range.update(ranges)

    def kept(symints: Sequence[torch.SymInt]) -> list[Any]:
        given = {s.node.expr for s in symints}
        stated = [g if g.expr.free_symbols <= given else g._replace(expr=write(g.expr)) for g in env.guards]
        return [g for g in stated if g.expr.free_symbols <= given]

    env.produce_guards_verbose = written
    env.get_pruned_guards = kept


def known_true(env: symbolic_shapes.ShapeEnv, condition: sympy.Basic) -> bool:
    """Whether a trace knows, without a new guard, that `condition` holds."""
    if vars(env).get("dtensor_known") != len(env.axioms):  # torch's cache of results ignores new guards
        vars(env)["dtensor_known"] = len(env.axioms)
        env._version_counter += 1
    return env._maybe_evaluate_static(condition) is sympy.true


def evaluated(like: torch.SymInt, condition: sympy.Basic) -> bool:
    """Whether `condition`, in symbols of the same trace as `like`, holds. Adds a guard on the result."""
    return bool(like.node.shape_env.evaluate_expr(condition))


@contextmanager
def without_guards(env: symbolic_shapes.ShapeEnv) -> Iterator[None]:
    """Context in which operators on fake tensors hold for all sizes of a trace: they add no guard and no symbol.

    Otherwise torch would conclude that sizes with equal example values are equal, and guard that.
    """
    with ExitStack() as stack:
        stack.enter_context(env.suppress_guards())
        stack.enter_context(env.ignore_fresh_unbacked_symbols())
        if env.backed_var_to_val:
            stack.enter_context(symbolic_config.patch(backed_size_oblivious=True))  # pyright: ignore
        yield


def known_equal(a: Any, b: Any) -> bool:
    """Whether two sizes are equal; for symbolic ones, whether a trace knows that without a new guard."""
    equal = a == b
    return equal if type(equal) is bool else symbolic_shapes.statically_known_true(equal)


def _trace_powers() -> None:
    """Torch can recompute a size that was not traced, except for powers, and sympy writes s * s as a power."""
    _sympy_handlers()[sympy.Pow] = operator.pow


when_imported("torch.fx.experimental.symbolic_shapes", _trace_powers)


def traced_size(size: Any) -> Any:
    """Express a size that was computed outside the trace as one that the graph can compute.

    Otherwise torch could mistake arithmetic with it for the definition of its own symbols. A size that the trace knows
    only from a tangent is computed again if possible, because the forward cannot read tangents.
    """
    mode = get_proxy_mode() if isinstance(size, torch.SymInt) else None
    if mode is None:
        return size
    tracker = mode.tracer.symnode_tracker
    if size in tracker and not _is_of_tangent(tracker[size]):
        return size
    number = size.node.maybe_as_int()
    if number is not None:
        return number
    made = _traced(mode.tracer.sympy_expr_tracker, size.node.shape_env.replace(size.node.expr))
    return size if made is None else made


def _traced(known: Mapping[sympy.Symbol, Any], expr: Any) -> Any:
    """`expr` computed again from the symbols that a trace knows; None if one is missing."""
    values = {s: known[s].value for s in expr.free_symbols if s in known}
    if len(values) < len(expr.free_symbols):
        return None
    from torch.utils._sympy.interp import sympy_interp

    return sympy_interp(_anew(), values, expr)


@functools.cache
def _anew() -> Any:
    """Torch's evaluation of a sympy expression in Python, plus the operations that torch leaves to sympy."""
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    class Anew(PythonReferenceAnalysis):
        @staticmethod
        def pow_by_natural(x: Any, n: int) -> Any:
            return functools.reduce(operator.mul, [x] * n)

        @staticmethod
        def trunc_to_int(x: Any, dtype: torch.dtype) -> Any:
            return torch.sym_int(x)

    return Anew


def sizes_before_strides(given: Any) -> None:
    """Make the graph being traced read its symbols from the sizes of the tensors in `given`.

    Torch may read them from strides that are the same symbols, but the stride next to a length of zero is one.
    """
    mode = get_proxy_mode()
    if mode is None:
        return
    traced, found = mode.tracer.symnode_tracker, mode.tracer.sympy_expr_tracker
    for size in (n for x in tree_leaves(given) if isinstance(x, torch.Tensor) for n in x.shape):
        if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol and size in traced:
            found[size.node.expr] = _SympyExprTrackerValue(traced[size], size)


class _FirstDefinitions(dict):
    def __setitem__(self, symbol: sympy.Symbol, value: Any) -> None:
        self.setdefault(symbol, value)


def keep_first_definitions() -> None:
    """Make the graph being traced on this thread, if any, keep its first definition of each symbol.

    Torch uses the last one. After y = x - 1, the result of y + 1 would then define x, while y is computed from x.
    """
    mode = get_proxy_mode()
    if mode is not None and not isinstance(mode.tracer.sympy_expr_tracker, _FirstDefinitions):
        mode.tracer.sympy_expr_tracker = _FirstDefinitions(mode.tracer.sympy_expr_tracker)


def is_traced() -> bool:
    """Whether arithmetic with sizes is recorded in a graph on this thread.

    Every write calls this, so it checks the cheap condition first.
    """
    return torch._C._len_torch_dispatch_stack() > 0 and get_proxy_mode() is not None


def is_written(symbol: sympy.Symbol) -> bool:
    """Whether the graph being traced on this thread can express `symbol`; True if there is no graph.

    A definition from a tangent is dropped, because the forward cannot read tangents. Unless another input defines the
    symbol, too, it then has to be computed.
    """
    mode = get_proxy_mode()
    if mode is None:
        return True
    known = mode.tracer.sympy_expr_tracker
    if symbol in known and _is_of_tangent(known[symbol].proxy):
        by_node: Any = mode.tracer.symnode_tracker.sym_node_dict
        sources = {node: _placeholder(by_node[node]) for node in by_node if node.expr == symbol}
        told = known.pop(symbol)
        for node, source in sources.items():
            if source is None or is_tangent(source):
                del by_node[node]
            elif symbol not in known:
                known[symbol] = dataclasses.replace(told, proxy=by_node[node], value=torch.SymInt(node))
    return symbol in known


def _is_of_tangent(proxy: Any) -> bool:
    """Whether the definition of a size in a trace is a size of a tangent."""
    source = _placeholder(proxy)
    return source is not None and is_tangent(source)


def is_tangent(source: torch.fx.Node) -> bool:
    """Whether an input of a joint graph is a tangent."""
    return source.name.startswith("tangents")


def _placeholder(proxy: Any) -> torch.fx.Node | None:
    """The graph input that defines a size in a trace, directly or by one of its sizes; None if none does."""
    node = (proxy.force() if isinstance(proxy, Thunk) else proxy).node
    source = node.args[0] if node.op == "call_function" and node.args else node
    return source if isinstance(source, torch.fx.Node) and source.op == "placeholder" else None


def free_symbols(value: Any) -> set[sympy.Symbol]:
    """The symbols in the sizes of a node's value."""
    found: set[sympy.Symbol] = set()
    for x in tree_leaves(value):
        sizes = (*x.shape, *x.stride()) if isinstance(x, torch.Tensor) else (x,)
        found.update(*[n.node.expr.free_symbols for n in sizes if isinstance(n, torch.SymInt)])
    return found


__all__ = [
    "around_guards",
    "assumed_size",
    "binary_products",
    "define_strides",
    "differ",
    "evaluated",
    "free_symbols",
    "guard_at_most_example",
    "guards_hold",
    "guards_on",
    "guards_written_by",
    "has_hint",
    "hint",
    "is_tangent",
    "is_traced",
    "is_written",
    "keep_first_definitions",
    "known_equal",
    "known_true",
    "number_if_guarded",
    "number_if_known",
    "offsets_stand_alone",
    "on_replaced_sizes",
    "replace_size",
    "same_size",
    "size_formula",
    "size_of",
    "sizes_before_strides",
    "stand_in",
    "symbolic_mode",
    "trace_with",
    "traced_size",
    "without_guards",
    "write_numbers",
]
