"""Changes to Dynamo that let it trace DTensors: for their sizes, inner tensors and attributes, for branches and loops,
for its errors, and with the backend of this library. They wait until torch imports Dynamo. See also `compiling`."""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .on_demand import symbolic_shapes, with_dynamo
from .own_errors import unlogged
from .symbolic_sizes import free_symbols, offsets_stand_alone  # first: it checks the version of torch

# isort: split
from torch._library.opaque_object import is_opaque_value


@with_dynamo
def register_backend(backend: Callable[..., Any], name: str) -> None:
    """Register `backend` with torch.compile, unless torch has already registered that name from an entry point."""
    from torch._dynamo.backends import registry

    if name not in registry._BACKENDS:
        registry.register_backend(backend, name)


@with_dynamo
def compile_nothing() -> None:
    """Let torch.compile return what it is given, from now on."""
    from torch._dynamo import config

    config.disable = True


def compile_with(backend: Callable[[Any, Any], Any], unless: Sequence[str] = ()) -> None:
    """Let torch.compile call `backend(gm, example_inputs)` in place of any backend whose name is not in `unless`, from
    now on."""

    def inductor(self: Any, model_: Any, inputs_: Any, **_: Any) -> Any:
        return backend(model_, inputs_)

    own = torch._TorchCompileWrapper.__call__

    def named(self: Any, model_: Any, inputs_: Any) -> Any:
        return own(self, model_, inputs_) if self.compiler_name in unless else backend(model_, inputs_)

    torch._TorchCompileInductorWrapper.__call__ = inductor
    torch._TorchCompileWrapper.__call__ = named


@functools.cache
def own_compile() -> Callable[..., Any]:
    """How Dynamo compiles a frame, before `frames` stands before it."""
    from torch._dynamo.convert_frame import ConvertFrameAssert

    return ConvertFrameAssert.__call__


@with_dynamo
def stand_before_dynamo() -> None:
    """Let `frames` stand before Dynamo once a frame is compiled: it takes long to import."""
    from torch._dynamo.convert_frame import ConvertFrameAssert

    if ConvertFrameAssert.__call__ is own_compile():

        def first(self: Any, *args: Any, **kwargs: Any) -> Any:
            importlib.import_module("dtensor.torch_private.frames").install()
            return ConvertFrameAssert.__call__(self, *args, **kwargs)

        ConvertFrameAssert.__call__ = first


@with_dynamo
def before_optimizers_are_traced(call: Callable[[torch.optim.Optimizer], Any]) -> None:
    """Make Dynamo call `call` with an optimizer before it looks at its parameters, whenever it traces one."""
    from torch._dynamo.variables.optimizer import OptimizerVariable

    own = OptimizerVariable.__init__

    @functools.wraps(own)
    def __init__(self: Any, value: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        call(value)
        own(self, value, *args, **kwargs)

    OptimizerVariable.__init__ = __init__


@with_dynamo
def inner_sizes_follow(cls: type) -> None:
    """Make Dynamo use symbols for the sizes of inner tensors of `cls` exactly where it does for the outer tensor.

    Inner sizes that it has seen before have no influence. The symbols are unbacked (as with `mark_unbacked`), that is,
    without a value; `cls.__tensor_unflatten__` defines them.
    """
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables import builder

    own, kinds = builder._automatic_dynamic, symbolic_shapes.DimDynamic

    @functools.wraps(own)
    def policy(
        e: Any, tx: Any, source: Any, static_shapes: Any, outer_only: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        from .compiling import parts_count_as_wholes

        parts_count_as_wholes(cls)  # when something is compiled: to import what it changes takes 60 ms
        offsets_stand_alone()
        values_are_made_anew()
        if type(e) is not cls or outer_only:
            return own(e, tx, source, static_shapes, outer_only, *args, **kwargs)
        outer: Any = own(e, tx, source, static_shapes, True, *args, **kwargs)
        inner = {}
        for attr in e.__tensor_flatten__()[0]:
            if isinstance(getattr(e, attr), torch.Tensor):
                inner[attr] = symbolic_shapes.StatefulSymbolicContext(
                    dynamic_sizes=[
                        kinds.STATIC if kind is kinds.STATIC or size in (0, 1) else kinds.UNBACKED
                        for kind, size in zip(outer.dynamic_sizes, e.shape)  # torch makes no symbols for 0 and 1
                    ],
                    tensor_source=AttrSource(source, attr),
                )
        return symbolic_shapes.SubclassSymbolicContext(
            dynamic_sizes=outer.dynamic_sizes,
            dynamic_strides=outer.dynamic_strides,
            constraint_sizes=outer.constraint_sizes,
            constraint_strides=outer.constraint_strides,
            view_base_context=outer.view_base_context,
            tensor_source=outer.tensor_source,
            shape_env_to_source_to_symbol_cache=outer.shape_env_to_source_to_symbol_cache,
            excluded_sizes=outer.excluded_sizes,
            inner_contexts=inner,
        )

    builder._automatic_dynamic = policy


@with_dynamo
@functools.cache
def attributes_stand_with_their_tensors() -> None:
    """Make Dynamo write `x.attribute` of a tensor subclass, if its sizes are new symbols, into its graph next to `x`.

    Torch 2.13 writes it where a symbol is first needed. For an input that Dynamo meets later, that is before `x`.
    """
    from torch._dynamo.output_graph import SubgraphTracer
    from torch.fx.proxy import Attribute

    own = SubgraphTracer.track_produced_symints

    @functools.wraps(own)
    def tracked(self: Any, example_value: Any, e_proxy: Any) -> None:
        if isinstance(e_proxy, Attribute) and not free_symbols(example_value) <= self.bound_symbols.keys():
            e_proxy.node  # noqa: B018 (the property makes it)
        own(self, example_value, e_proxy)

    SubgraphTracer.track_produced_symints = tracked


@functools.cache
def values_are_made_anew() -> None:
    """Make code of Dynamo construct the placements that a function had made before a graph break.

    Torch 2.13 returns them from the graph, out of which they come as stand-ins of a trace.
    """
    from torch._dynamo.bytecode_transformation import create_call_function
    from torch._dynamo.codegen import PyCodegen
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.script_object import TorchScriptObjectVariable

    own = PyCodegen.__call__

    @functools.wraps(own)
    def load(self: Any, value: Any, allow_cache: bool = True) -> None:
        found = value.realize() if isinstance(value, VariableTracker) else None
        if type(found) is not TorchScriptObjectVariable or found.source is not None:
            return own(self, value, allow_cache)
        made = found.as_python_constant()
        by_value = type(made).__eq__ is not object.__eq__  # a layout, which is interned, is not made anew
        if not (dataclasses.is_dataclass(made) and by_value):
            return own(self, value, allow_cache)
        given = [getattr(made, field.name) for field in dataclasses.fields(made)]
        self.add_push_null(lambda: self.load_import_from(type(made).__module__, type(made).__qualname__))
        self.extend_output([self.create_load_const(x) for x in given])
        self.extend_output(create_call_function(len(given), False))

    PyCodegen.__call__ = load


@with_dynamo
@functools.cache
def explain_traced_errors(explain: Callable[[Iterator[Any], str], Exception | None]) -> None:
    """Make Dynamo raise what `explain` returns when an operator fails on fake tensors.

    `explain` takes the modules whose code is being traced, innermost first, and the text of the error. It may return
    None for the operator's own error.
    """
    from torch._dynamo import utils

    own = utils.run_node

    @functools.wraps(own)
    def run(tracer: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            with unlogged():
                return own(tracer, *args, **kwargs)
        except RuntimeError as error:
            why, told = error.__cause__, None
            if type(error) is type(why) is RuntimeError:  # other types have a meaning for Dynamo, or are complete
                told = explain(_modules_traced(tracer.current_tx), str(why))
            if told is None:
                raise
            raise RuntimeError(f"{told}\n{error}").with_traceback(error.__traceback__) from told

    utils.run_node = run


def _modules_traced(translator: Any) -> Iterator[Any]:
    while translator is not None:
        for name in translator.f_code.co_varnames[:1]:
            if (module := _module(translator, name)) is not None:
                yield module
        translator = translator.parent


def traced_modules(function: Any, argument: str) -> Iterator[Any]:
    """The module that is `argument` of each call of `function` that is being traced, innermost first."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    translator: Any = InstructionTranslator.current_tx().output.current_tx
    while translator is not None:
        if translator.f_code is function.__code__ and (module := _module(translator, argument)) is not None:
            yield module
        translator = translator.parent


def _module(translator: Any, name: str) -> Any:
    """The module that a local variable of a frame that is being traced holds, or None."""
    from torch._dynamo.variables import LazyVariableTracker, UnspecializedNNModuleVariable

    variable = translator.symbolic_locals.get(name)
    variable = variable.unwrap() if isinstance(variable, LazyVariableTracker) else variable
    return variable.value if isinstance(variable, UnspecializedNNModuleVariable) else None


def higher_order_take(cls: type) -> None:
    """Make torch and Dynamo accept DTensors as inputs of branches and loop bodies.

    Torch accepts only tensors and sizes as inputs; with DTensors, their mesh is accepted, too.
    """
    for name in ("cond", "scan", "while_loop"):
        module: Any = importlib.import_module(f"torch._higher_order_ops.{name}")
        module.validate_subgraph_args_types = _but_for_meshes(module.validate_subgraph_args_types, cls)
    _trace_higher_order(cls)


@with_dynamo
def _trace_higher_order(cls: type) -> None:
    """Let Dynamo pass DTensors to branches and loop bodies.

    Dynamo needs to know which results of a loop share memory: they do if their local tensors do. It also passes to a
    branch all symbols in its inputs. For a DTensor these are those of the outer tensor, because nothing in Dynamo's
    graph refers to its local tensor.
    """
    from torch._dynamo.output_graph import SubgraphTracer
    from torch._dynamo.variables import higher_order_ops

    storages, lift = higher_order_ops.get_tensor_storages, SubgraphTracer._lift_basic_symbols
    part: Any = None

    @functools.wraps(storages)
    def of_local(x: torch.Tensor) -> Any:
        return storages(x._local_tensor if isinstance(x, cls) else x)  # pyright: ignore[reportAttributeAccessIssue]

    @functools.wraps(lift)
    def of_whole(self: Any, example_value: Any, src: Any) -> None:
        nonlocal part
        if part is not None and example_value is part:
            return
        if not isinstance(example_value, cls) or self.parent is None:
            lift(self, example_value, src)
            return
        part = example_value._local_tensor  # pyright: ignore[reportAttributeAccessIssue]
        try:
            lift(self, example_value, src)  # lifts its own sizes, then those of its inner tensors
        finally:
            part = None

    higher_order_ops.get_tensor_storages = of_local
    SubgraphTracer._lift_basic_symbols = of_whole


def _but_for_meshes(check: Callable[[Sequence[Any]], None], cls: type) -> Callable[[Sequence[Any]], None]:
    @functools.wraps(check)
    def checked(args: Sequence[Any]) -> None:
        sharded = any(isinstance(x, cls) for x in args)
        check([x for x in args if not (sharded and is_opaque_value(x))])

    return checked


def forget_compiled() -> None:
    """Drop everything compiled, as if this process had just started; cache files stay."""
    from torch._dynamo.utils import counters
    from torch._inductor.utils import clear_caches

    torch.compiler.reset()
    clear_caches()
    counters.clear()


__all__ = [
    "attributes_stand_with_their_tensors",
    "before_optimizers_are_traced",
    "compile_nothing",
    "compile_with",
    "explain_traced_errors",
    "forget_compiled",
    "higher_order_take",
    "inner_sizes_follow",
    "own_compile",
    "register_backend",
    "stand_before_dynamo",
    "values_are_made_anew",
]
