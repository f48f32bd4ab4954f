"""Control flow in compiled code: `torch.cond`, `while_loop`, `scan`, `map` and nested regions on DTensors.

Torch traces the functions passed to these operators as separate graphs that support plain tensors only. So the
operators are intercepted on DTensor's own dispatch key and called on local tensors. A branch or body wraps this rank's
local tensors as DTensors, runs, and returns local tensors again. A value carried from run to run keeps its layout; any
other result has the layout that the first traced function gave it. Predicates and conditions are replicated, so that
all ranks take the same branch and run the same collectives.

    cond(p, f, g, (x,))   ->   wrap(cond(replicated p, unwrap . f . wrap, unwrap . g . wrap, (local x,)))

The collectives of a branch stay in its graph. Passes run on that graph and the ranks compare it like any other.
Manifests cover only the surrounding graph, because it is unknown how often a branch runs.
"""

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..dispatch.global_view import check_global
from ..dispatch.plain_operands import check_invariant, is_alike
from ..errors import OperatorError
from ..layout.layout import Layout
from ..mesh.local_sizes import written
from ..mesh.provenance import note_alike
from ..mesh.tensor_spec import contiguous_stride
from ..torch_private.core import catch_higher_order, higher_order_operators, tree_flatten, tree_map
from ..torch_private.dynamo import higher_order_take
from ..torch_private.symbolic_sizes import has_hint
from .tensor import DTensor, FromLocal


@dataclass(frozen=True)
class Form:
    """The metadata that turns a local tensor into a DTensor: mesh, layout, global shape and stride."""

    mesh: DeviceMesh
    layout: Layout
    shape: tuple[Any, ...]
    stride: tuple[Any, ...]

    @staticmethod
    def of(x: Any) -> "Form | None":
        """The form of `x`; None if it is not a DTensor."""
        if not isinstance(x, DTensor):
            return None
        return Form(x.device_mesh, x._spec.layout, tuple(x.shape), tuple(x.stride()))

    def whole(self, local: torch.Tensor) -> DTensor:
        """The DTensor of this form with a local tensor; differentiable."""
        shape, stride = (tuple(map(written, sizes)) for sizes in (self.shape, self.stride))
        return FromLocal.apply(local, self.mesh, self.layout, shape, stride, self.layout.without_partial())

    def slice(self) -> "Form":
        """The form of one slice along the first dim, which is not sharded."""
        layout = Layout.make(self.layout.mesh_ndim, self.layout.dims[1:], self.layout.partial)
        return replace(self, layout=layout, shape=self.shape[1:], stride=self.stride[1:])

    def stack(self, length: Any) -> "Form":
        """The form of `length` such tensors, stacked along a new first dim."""
        layout = Layout.make(self.layout.mesh_ndim, ((), *self.layout.dims), self.layout.partial)
        shape = (length, *self.shape)
        return replace(self, layout=layout, shape=shape, stride=contiguous_stride(shape))


Forms = list[Form | None]


class Results:
    """The forms of the results of one call's functions. The first function traced sets them; the others must match.

    Attributes:
        name: name of the operator, for errors.
        forms: forms of the results. Before a function has been traced, only those of the leading results that are known
            in advance.
    """

    def __init__(self, name: str, known: Sequence[Form | None] = ()) -> None:
        self.name = name
        self.forms: Forms = list(known)
        self.complete: bool = False

    def parts(self, made: Sequence[Any]) -> tuple[Any, ...]:
        """The local tensors of a function's results, each in the layout that `forms` holds for it.

        Raises:
            OperatorError: the functions return different numbers of results, or a result is a DTensor in one and a
                plain tensor in another, or has another shape.
        """
        if not self.complete:
            self.forms += [Form.of(_reduced(x)) for x in made[len(self.forms) :]]
            self.complete = True
        if len(made) != len(self.forms):
            raise OperatorError(f"{self.name}: one function returns {len(self.forms)} results, another {len(made)}")
        return tuple([self._part(i, x, form) for i, (x, form) in enumerate(zip(made, self.forms, strict=True))])

    def _part(self, i: int, x: Any, form: Form | None) -> Any:
        if (form is None) != (not isinstance(x, DTensor)):
            raise OperatorError(
                f"{self.name}: value {i} is a DTensor in one place and a plain tensor in another; write "
                "distribute_tensor(x, device_mesh, placements) for the plain one"
            )
        if form is None:
            return x
        if tuple(x.shape) != form.shape:
            raise OperatorError(
                f"{self.name}: value {i} has shape {tuple(x.shape)} in one place and {form.shape} in another; "
                "for DTensors both must have the same shape"
            )
        return _in_layout(x, form.layout).to_local().contiguous()

    def whole(self, made: Any, forms: Forms | None = None) -> Any:
        """DTensors of the local tensors that the operator returned."""
        forms = self.forms if forms is None else forms
        return type(made)(
            [x if form is None else _contiguous(form).whole(x) for x, form in zip(made, forms, strict=True)]
        )


class Operands:
    """The operands of a call: the local tensors passed to torch, and the forms that turn them into DTensors again.

    Attributes:
        forms: the form of each operand; None for one that is not a DTensor.
        parts: the operands passed to torch: local tensors, plain tensors and sizes.
        others: operands of other types, by position, that bypass torch, such as the mesh that a style in a branch uses.
        alike: for each operand, whether it is a plain tensor that is the same on all ranks.
    """

    def __init__(self, given: Sequence[Any]) -> None:
        self.others: dict[int, Any] = {
            k: x for k, x in enumerate(given) if not isinstance(x, (torch.Tensor, int, torch.SymInt))
        }
        self.forms: Forms = [Form.of(x) for x in given]
        self.parts: list[Any] = [
            x.to_local() if isinstance(x, DTensor) else x for k, x in enumerate(given) if k not in self.others
        ]
        self.alike: list[bool] = [
            isinstance(x, torch.Tensor) and not isinstance(x, DTensor) and is_alike(x) for x in given
        ]

    def on_parts(self, function: Callable[..., Any], finish: Callable[[list[Any]], Any]) -> Callable[..., Any]:
        """`function` on local tensors; `finish` converts the list of its results to the value returned to torch."""

        def run(*parts: Any) -> Any:
            rest, given = iter(parts), []
            for k, form in enumerate(self.forms):
                x = self.others[k] if k in self.others else next(rest)
                if self.alike[k]:
                    note_alike(x)
                given.append(x if form is None else form.whole(_viewable(x)))
            return finish(tree_flatten(function(*given))[0])

        return run


def _viewable(x: torch.Tensor) -> torch.Tensor:
    """`x`, or a copy if its storage offset is only known at run time: views of such a slice cannot be traced."""
    return x if has_hint(x.storage_offset()) else x.clone()


def _contiguous(form: Form) -> Form:
    return replace(form, stride=contiguous_stride(form.shape))


def _in_layout(x: DTensor, layout: Layout) -> DTensor:
    return x if x._spec.layout is layout else torch.ops.dtensor.redistribute(x, layout.text, False)


def _reduced(x: Any) -> Any:
    """A result. Partial sums stay partial, to be reduced once after the operator; other partial results are reduced."""
    if not isinstance(x, DTensor) or all(op == "sum" for _, op in x._spec.layout.partial):
        return x
    return _in_layout(x, x._spec.layout.without_partial())


def _carried(x: Any) -> Any:
    """A value that is carried from one run of a body to the next: not partial, and contiguous."""
    return _in_layout(x, x._spec.layout.without_partial()).contiguous() if isinstance(x, DTensor) else x


def _along_first(x: Any) -> Any:
    """A tensor that the operator slices along its first dim, with that dim gathered on every rank."""
    if not isinstance(x, DTensor):
        return x
    layout = x._spec.layout
    return _in_layout(x, Layout.make(layout.mesh_ndim, ((), *layout.dims[1:]), layout.partial))


def _decides(name: str, x: Any) -> Any:
    """A predicate, gathered on every rank. A plain tensor must be known to be the same on all ranks, as scalars are.

    Raises:
        MixedTensorError: a plain predicate may differ between the ranks.
    """
    if not isinstance(x, DTensor):
        if isinstance(x, torch.Tensor):
            check_invariant(name, "pred", x)
        return x
    return _in_layout(x, Layout.make(x._spec.layout.mesh_ndim, ((),) * x.dim(), ())).to_local()


def cond(
    operator: Any, pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Sequence[Any] = ()
) -> Any:
    """`torch.cond`."""
    given, results = Operands(operands), Results("torch.cond")
    branches = [given.on_parts(f, results.parts) for f in (true_fn, false_fn)]
    return results.whole(operator(_decides("torch.cond", pred), *branches, tuple(given.parts)))


def while_loop(
    operator: Any, cond_fn: Callable[..., Any], body_fn: Callable[..., Any], carried: Sequence[Any], more: Sequence[Any]
) -> Any:
    """`torch.while_loop`."""
    n = len(carried)
    given = Operands([*map(_carried, carried), *more])
    results = Results("torch.while_loop", given.forms[:n])
    on_parts = given.on_parts(cond_fn, lambda made: _decides("torch.while_loop", *made))
    functions = on_parts, given.on_parts(body_fn, results.parts)
    return results.whole(operator(*functions, tuple(given.parts[:n]), tuple(given.parts[n:])))


def scan(
    operator: Any, combine: Callable[..., Any], init: list[Any], xs: list[Any], additional_inputs: Sequence[Any]
) -> Any:
    """`torch.scan`: carries `init` and slices `xs` along their first dim."""
    n, m = len(init), len(xs)
    given = Operands([*map(_carried, init), *map(_along_first, xs), *additional_inputs])
    length = given.parts[n].shape[0]
    given.forms[n : n + m] = [form and form.slice() for form in given.forms[n : n + m]]
    results = Results("torch.scan", given.forms[:n])
    parts = given.parts[:n], given.parts[n : n + m], tuple(given.parts[n + m :])
    made = operator(given.on_parts(combine, results.parts), *parts)
    return results.whole(made, [*results.forms[:n], *[form and form.stack(length) for form in results.forms[n:]]])


def mapped(operator: Any, function: Callable[..., Any], xs: Sequence[Any], more: Sequence[Any], **options: Any) -> Any:
    """`torch.map`: slices `xs` along their first dim. Since torch 2.15 its options may list the written operands."""
    m = len(xs)
    given = Operands([*map(_along_first, xs), *more])
    length = given.parts[0].shape[0]
    given.forms[:m] = [form and form.slice() for form in given.forms[:m]]
    results = Results("torch.map")
    options = {name: value for name, value in options.items() if value}
    made = operator(given.on_parts(function, results.parts), given.parts[:m], tuple(given.parts[m:]), **options)
    return results.whole(made, [form and form.stack(length) for form in results.forms])


def subgraph(operator: Any, function: Callable[..., Any], identifier: Any, *operands: Any) -> Any:
    """`torch.compiler.nested_compile_region`. Torch traces once per identifier, so the layouts become part of it."""
    given, results = Operands(operands), Results("nested_compile_region")
    layouts = "_".join(["" if form is None else re.sub(r"\W", "", form.layout.text) for form in given.forms])
    return results.whole(operator(given.on_parts(function, results.parts), f"{identifier}_{layouts}", *given.parts))


def flex_attention(operator: Any, query: Any, key: Any, value: Any, *more: Any, **named: Any) -> Any:
    """`flex_attention` on full tensors, because the function that modifies scores reads batch and head indices.

    Whatever else it takes is plain: the tensors of a block mask, torch's empty one too, and those that the functions
    capture. They index full tensors, so they are global values, and the ranks compare them as in a global view.
    """
    mesh = next(x.device_mesh for x in (query, key, value) if isinstance(x, DTensor))
    number = itertools.count()

    def whole(x: Any) -> Any:
        if isinstance(x, DTensor):
            return _in_layout(x, Layout.make(mesh.ndim, ((),) * x.dim(), ())).to_local()
        if isinstance(x, torch.Tensor):
            name = f"block_mask, score_mod or what they capture, tensor {next(number)}"
            check_global("flex_attention", name, x, mesh, always=True)
        return x

    def wrapped(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        layout = Layout.make(mesh.ndim, ((),) * x.dim(), ())
        return FromLocal.apply(x, mesh, layout, tuple(x.shape), tuple(x.stride()), layout)

    return tree_map(wrapped, operator(*tree_map(whole, (query, key, value, *more)), **tree_map(whole, named)))


CAUGHT: dict[str, Any] = {
    "flex_attention": flex_attention,
    "cond": cond,
    "while_loop": while_loop,
    "scan": scan,
    "map_impl": mapped,
    "invoke_subgraph": subgraph,
}
"""Name of a torch higher-order operator -> the function called instead, with the operator, if it meets a DTensor."""


def _refuse(operator: Any, *args: Any, **kwargs: Any) -> Any:
    raise OperatorError(
        f"{operator.name()}: this higher-order operator of torch does not accept DTensors; wrap the function that "
        "calls it in dtensor.local_map, so that it sees local tensors"
    )


higher_order_take(DTensor)
for _operator in higher_order_operators():
    catch_higher_order(_operator, CAUGHT.get(_operator.name(), _refuse))


__all__ = ["Form", "Operands", "Results", "cond", "mapped", "scan", "subgraph", "while_loop"]
