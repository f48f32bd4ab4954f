"""The `dtensor` backend of torch.compile: AOTAutograd, then the passes, then the inner compiler.

Compiled functions convert the tangents of their backward to the form in which they were traced. AOTAutograd cannot take
a plain tensor, or the plain zeros of an output that no loss used, where it traced a DTensor.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from torch import fx

from dtensor.dispatch.strictness import strict
from dtensor.dispatch.view_copies import lose, root
from dtensor.dispatch.whole_graph import deciding
from dtensor.errors import ArgumentError
from dtensor.job.job import explain, failure_told
from dtensor.parallel.checks.input_check import explain_difference
from dtensor.tensor.plain_passes import PARTITIONER, chained, others_partitioner
from dtensor.tensor.tensor import DTensor, complete_tangents
from dtensor.torch_private.compiling import (
    RestartAnalysis,
    SizesSettled,
    aot_backend,
    boxed,
    check_results,
    inductor_compile,
    leave_missing,
    on_tangents,
    traced_again_if_settled,
)
from dtensor.torch_private.partitioning import min_cut_partition
from dtensor.torch_private.peak_memory import Bound, HeldMore, bounded
from dtensor.torch_private.training.whole_steps import decompositions, inductor_options

from ..recording.watch_compiles import dumped
from .alternatives import price_alternatives
from .inductor import STAGES, Partition
from .options import Options
from .run_passes import branches, optimise, partitioned, simplify_joint, sparing


def backend(
    gm: fx.GraphModule,
    example_inputs: Any,
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph. `torch.compile(model, backend="dtensor", options=...)` calls this function.

    Args:
        gm: Dynamo's graph.
        example_inputs: its inputs.
        options: see `dtensor.compile.Options`.
        mode: not supported; use `options`.

    Returns:
        The compiled function.

    Raises:
        ValueError, TypeError: unknown or invalid options.
        StrictError: with the option `strict`, an operator would communicate implicitly.
        PassError: a pass left an invalid graph or, with the option `verify`, changed what it computes.
    """
    chosen = Options.of(options).at_level()
    if mode is not None:
        raise ArgumentError(f"backend 'dtensor' takes no mode, got {mode!r}; write options={{...}}")
    return _entered(gm, example_inputs, chosen)


def leveled(gm: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
    """Compile a Dynamo graph as far as the environment says, in place of another backend.

    Raises:
        ValueError: an environment variable holds an invalid value.
    """
    return _entered(gm, example_inputs, Options.of_environment().at_level())


def _entered(gm: fx.GraphModule, example_inputs: Any, chosen: Options) -> Callable[..., Any]:
    if chosen.strict and chosen.inner == "eager":
        return strict()(gm.forward)
    with ExitStack() as stack:
        stack.enter_context(deciding(chosen.decide))
        if any(isinstance(x, DTensor) for x in example_inputs):
            stack.enter_context(failure_told("compiled", unless=RestartAnalysis))
        if chosen.strict:  # all graphs, the joint graph included, are traced inside
            stack.enter_context(strict())
        if chosen.dump is not None:
            stack.enter_context(dumped(gm, chosen.dump))
        return _compiled(gm, example_inputs, chosen)


def _compiled(gm: fx.GraphModule, example_inputs: Any, chosen: Options) -> Callable[..., Any]:
    if chosen.inner == "eager":
        return gm.forward
    try:
        with traced_again_if_settled():
            compiled = _within_memory(gm, example_inputs, chosen)
    except SizesSettled:
        compiled = _within_memory(gm, example_inputs, chosen)
    return as_returned(compiled, _views_returned(gm))


TURNS = 6
"""How often at most a step is compiled until its kernels hold what they may."""


def _within_memory(gm: fx.GraphModule, example_inputs: Any, chosen: Options) -> Callable[..., Any]:
    """Compile, again as long as the kernels of a compiler hold more than the graph that it was given."""
    if chosen.memory is None or chosen.inner != "inductor":
        return _traced(gm, example_inputs, chosen)
    # What is left to the kernels: with `low` they held more than they may, with `high` no graph was found.
    spare, low, high = 0, 0, None
    least: int | None = None
    for turn in range(TURNS):
        bound = Bound(chosen.memory)
        try:
            with bounded(bound), sparing(spare):
                return _traced(gm, example_inputs, chosen)
        except HeldMore as error:
            held = bound.given + error.bytes
            least, low = held if least is None else min(held, least), spare
            spare = low + (held - chosen.memory) * 2**turn
        except ArgumentError:
            if least is None:
                raise
            high = spare
        if high is not None and spare >= high:
            spare = (low + high) // 2
    raise ArgumentError(
        f"a step of at most memory={chosen.memory:,} bytes was not found; with kernels of Inductor the smallest that "
        f"was takes {least:,}. Give it as much, cut parameters over more ranks, or take a smaller batch"
    )


Views = list[tuple[list[int], list[int], list[int]]]
"""Results that share memory on one device: (copies, inputs, other results) by index."""


def as_returned(compiled: Callable[..., Any], views: Views | None) -> Callable[..., Any]:
    """Wrap a compiled function as this backend returns it; None for `views`: as Inductor returns it."""
    if views is None:
        return compiled
    made = _noting_views(_taking_all_tangents(compiled), views)
    _views[made] = views
    return made


def how_returned(made: Callable[..., Any]) -> Views | None:
    """The `views` with which `as_returned` made a function; None if it did not."""
    return _views.get(made)


_views: WeakKeyDictionary[Callable[..., Any], Views] = WeakKeyDictionary()


def _traced(gm: fx.GraphModule, example_inputs: Any, chosen: Options) -> Callable[..., Any]:
    if chosen.inner == "inductor":
        patches: dict[str, Any] = {stage: chained(stage, made(chosen)) for stage, made in STAGES.items()}
        patches[PARTITIONER] = Partition(chosen, others_partitioner())
        return inductor_compile(gm, example_inputs, patches | inductor_options())
    compilers = _interpreters(chosen)
    return aot_backend(partial(_partition, chosen), *compilers, decompositions=decompositions())(gm, example_inputs)


def _partition(options: Options, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
    check_results(gm.graph, kwargs["num_fwd_outputs"])
    for branch in branches(gm):
        simplify_joint(branch.graph, options, within=True)
        branch.recompile()
    simplify_joint(gm.graph, options)
    price_alternatives(gm, joint_inputs, options, min_cut_partition, **kwargs)
    return partitioned(gm, joint_inputs, options, min_cut_partition, **kwargs)


def _interpreters(options: Options) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """Compilers of the forward, inference and backward graphs that run the optimised graph operator by operator."""

    def compiler(inference: bool) -> Callable[..., Any]:
        def compile_graph(gm: fx.GraphModule, _: Any) -> Any:
            for branch in branches(gm):
                optimise(branch.graph, options, inference=inference, within=True)
                branch.recompile()
            optimise(gm.graph, options, inference=inference)
            gm.recompile()
            return boxed(gm.forward)

        return compile_graph

    return compiler(False), compiler(True), compiler(False)


def _views_returned(gm: fx.GraphModule) -> Views:
    """The results that are copies of values sharing memory on one device: (copies, inputs, other results) by index."""

    def roots(nodes: Iterable[Any]) -> list[tuple[int, bool] | None]:
        values = [node.meta.get("example_value") if isinstance(node, fx.Node) else None for node in nodes]
        return [root(x) if isinstance(x, DTensor) else None for x in values]

    (results,) = gm.graph.output_node().args
    given, made = roots(gm.graph.find_nodes(op="placeholder")), roots(results)  # pyright: ignore
    found = []
    for memory in dict.fromkeys([r[0] for r in made if r is not None and r[1]]):
        copies = [k for k, r in enumerate(made) if r == (memory, True)]
        inputs = [k for k, r in enumerate(given) if r is not None and r[0] == memory]
        others = [k for k, r in enumerate(made) if r == (memory, False)]
        if len(copies) + len(inputs) + len(others) > 1:
            found.append((copies, inputs, others))
    return found


def _noting_views(compiled: Callable[..., Any], views: Views) -> Callable[..., Any]:
    """Wrap `compiled` so that its results are known to be `views`; returns it unchanged where there are none."""
    if not views:
        return compiled

    def run(*args: Any) -> Any:
        out = compiled(*args)
        for copies, inputs, others in views:
            lose([out[k] for k in copies], [*[args[k] for k in inputs], *[out[k] for k in others]])
        return out

    return run


def _taking_all_tangents(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `compiled` so that where it traced DTensors its backward accepts any tangents, and missing ones."""
    own: list[int] = []  # indices of outputs that are DTensors with their own autograd history; the same in all calls

    def run(*args: Any) -> Any:
        try:
            out = compiled(*args)
        except RuntimeError as error:
            explain_difference(error)
            explain(error)
            raise
        if not own:
            own.extend([k for k, x in enumerate(out) if isinstance(x, DTensor) and _is_computed(x)])
            if not own:
                return out
            specs = {out[k].output_nr: out[k]._spec for k in own}
            on_tangents(out[own[0]].grad_fn, partial(complete_tangents, specs))
        leave_missing(out[own[0]].grad_fn)
        return out

    return run


def _is_computed(x: DTensor) -> bool:
    """Whether the compiled graph computed `x`; an alias of an input keeps its own autograd history."""
    return type(x.grad_fn).__name__ == "CompiledFunctionBackward"


__all__ = ["backend", "leveled"]
