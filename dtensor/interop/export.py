"""`export`: exports the graph that one rank runs for a model of DTensors, as a torch.export program.

torch.export.export cannot do this by itself: it records operators above autograd, before DTensors see them, and does
not accept tensor subclasses there. So the model is first traced below autograd, with the local tensors of its
parameters as inputs. This leaves local operators and collectives on plain tensors, which torch.export handles as usual.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..comm.from_plain import check_module
from ..errors import ArgumentTypeError
from ..mesh.local_sizes import divisibility_guarded
from ..tensor.tensor import DTensor
from ..torch_private.core import tree_flatten, tree_leaves, tree_unflatten
from ..torch_private.symbolic_sizes import guards_hold, guards_on, stand_in, symbolic_mode, trace_with

TRACED = "_traced"
"""The name of the submodule of a program that holds the graph."""


def export(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, *, dynamic_shapes: Any = None
) -> torch.export.ExportedProgram:
    """Exports the inference graph of a model whose parameters are DTensors and whose inputs and outputs are plain.

    The program holds this rank's local tensor of each parameter under the model's own names. Collectives are operators
    `torch.ops.dtensor.*` that refer to process groups by name. Every rank exports and runs its own program.
    torch.export.save and load work if the loading process imports dtensor and has created the same meshes in the same
    order.

    Args:
        model: the model, exported in its current mode; call `eval()` first for inference mode.
        args: example inputs.
        kwargs: example keyword inputs.
        dynamic_shapes: which sizes may differ from the examples', as for torch.export.export. None fixes all sizes.

    Returns:
        The exported program of this rank.

    Raises:
        TypeError: an input or output is a DTensor, `model` is not a module, or `args` is not a tuple.
        torch._dynamo.exc.UserError: a size declared dynamic cannot vary as declared, because of the model or of how it
            is sharded.
    """
    check_module("export", model)
    if not isinstance(args, tuple):
        raise ArgumentTypeError(f"export takes a tuple of example inputs; got {type(args).__name__}, write (x,)")
    _check_plain("input", (args, kwargs))
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    local = [_local(x) for x in state.values()]
    flat, form = tree_flatten((args, kwargs or {}))
    forms = []
    mode = symbolic_mode()
    parts = [stand_in(mode, x, name, False) for name, x in zip(state, local)]
    given = [_stand_in(mode, x, f"input{i}", dynamic_shapes is not None) for i, x in enumerate(flat)]

    def run(local: list[torch.Tensor], flat: list[Any]) -> list[Any]:
        whole = {name: _whole(x, like) for x, (name, like) in zip(local, state.items())}
        out = torch.func.functional_call(model, whole, *tree_unflatten(flat, form))
        _check_plain("output", out)
        leaves, out_form = tree_flatten(out)
        forms.append(out_form)
        return leaves

    with torch.no_grad():
        with divisibility_guarded():
            graph = trace_with(mode, run, parts, given)
        symbols = [(i, d) for i, x in enumerate(given) for d, n in enumerate(_sizes(x)) if isinstance(n, torch.SymInt)]
        code = guards_on(mode, [given[i].shape[d] for i, d in symbols])

        def check(flat: list[Any]) -> None:
            assert guards_hold(mode, code, [flat[i].shape[d] for i, d in symbols]), f"traced for other sizes: {code}"

        program = _Program(model, dict(zip(state, local)), graph, forms[-1], check)
        return torch.export.export(program, args, kwargs, dynamic_shapes=dynamic_shapes)


def _stand_in(mode: Any, x: Any, name: str, symbols: bool) -> Any:
    return stand_in(mode, x, name, symbols) if isinstance(x, torch.Tensor) else x


def _sizes(x: Any) -> tuple[Any, ...]:
    return tuple(x.shape) if isinstance(x, torch.Tensor) else ()


class _Program(nn.Module):
    """The traced graph as a module that holds the local tensors of a model under the model's names."""

    def __init__(
        self, model: nn.Module, local: dict[str, torch.Tensor], graph: nn.Module, form: Any, check: Callable[..., Any]
    ) -> None:
        super().__init__()
        self._names, self._form, self._check = tuple(local), form, check
        self.add_module(TRACED, graph)
        for name, x in local.items():
            path, _, last = name.rpartition(".")
            holder = self
            for part in path.split(".") if path else ():
                if part not in holder._modules:
                    holder.add_module(part, nn.Module())
                holder = holder.get_submodule(part)
            theirs = model.get_submodule(path)
            if last in theirs._parameters:
                trained = theirs._parameters[last]
                holder.register_parameter(
                    last, nn.Parameter(x, requires_grad=trained is not None and trained.requires_grad)
                )
            else:
                holder.register_buffer(last, x, persistent=last not in theirs._non_persistent_buffers_set)
        self.train(model.training)
        self.forward = functools.wraps(model.forward)(functools.partial(self._run))

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        found = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        flat = tree_leaves((args, kwargs))
        self._check(flat)  # in a trace this adds a guard on these sizes
        leaves = self.get_submodule(TRACED)([found[name] for name in self._names], flat)
        return tree_unflatten(leaves, self._form)


def _local(x: torch.Tensor) -> torch.Tensor:
    return x.to_local().detach() if isinstance(x, DTensor) else x.detach()


def _whole(local: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if not isinstance(like, DTensor):
        return local
    spec = like._spec
    return DTensor(local, spec.mesh, spec.layout, spec.shape, spec.stride)


def _check_plain(what: str, values: Any) -> None:
    for x in tree_leaves(values):
        if isinstance(x, DTensor):
            raise ArgumentTypeError(
                f"export takes a model with plain inputs and outputs, but an {what} is a DTensor, placed as "
                f"{list(x.placements)}; write x.to_local() or x.full_tensor(), or convert it with the model's styles: "
                "use_local_output=True, PrepareModuleInput, PrepareModuleOutput"
            )


__all__ = ["export"]
