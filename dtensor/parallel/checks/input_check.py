"""Checks whether all ranks pass the same inputs to a model. There are two checks.

`distribute_model` knows all inputs and compares them in each call, eager and compiled, with one small all-reduce of
checksums. Along axes that shard an input, all parts must have one shape; along the others it must have the same values.
All ranks of the mesh learn of a difference anywhere, so that all raise and none is left waiting. The check runs on the
device of the inputs, and on a GPU nothing waits for the result.

A style knows which inputs it assumes to be Replicate(). In eager mode it compares them from time to time
(`dtensor.comm.replication_check`); in compiled code the graph compares them.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ...comm.from_plain import of_all_ranks
from ...comm.replication_check import BY_STYLE, compare, is_due
from ...errors import AgreementError
from ...mesh.mesh import facts
from ...torch_private.core import assert_async, is_in_graph, never_traced
from .size_misfit import PLANNED

DIFFERS = (
    "distribute_model: argument {name} of forward differs between ranks; pass the same values on all ranks, or write "
    "inputs={{axis: Shard(dim)}} if each rank passes its part, all of one shape"
)

Given: TypeAlias = tuple[str, torch.Tensor, Sequence[int]]
"""The name of an argument, this rank's tensor, and the mesh axes over which that is a shard."""

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class InputCheck:
    """Compares inputs over a mesh."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh: DeviceMesh = mesh
        known = facts(mesh)
        axes = [a for a in range(mesh.ndim) if known.shape[a] > 1 and known.coordinate is not None]
        self.along: dict[int, str] = {a: known.groups[(a,)] for a in axes}
        """Axis -> its group."""
        whole = known.groups.get(tuple(axes))
        self.everyone: list[str] = [whole] if axes and whole is not None else list(self.along.values())
        """Groups that make up the mesh: reduced over one after the other."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "InputCheck":
        return self

    @never_traced
    def __call__(self, given: Sequence[Given]) -> None:
        """Compare the tensors of all ranks.

        Raises:
            AgreementError: tensors differ; raised on all ranks of the mesh. With the backend "inductor" it is a
                RuntimeError of the same text.
        """
        if not given or not self.everyone:
            return
        device = given[0][1].device
        values = torch.stack([_checksum(x.detach()).to(device) for _, x, _ in given])
        shapes = torch.stack([_number_of_shape(x).to(device) for _, x, _ in given])
        part = torch.tensor([bool(cut) for *_, cut in given], device=device)
        differs = torch.zeros_like(values)
        for axis, group in self.along.items():
            same = [bool(cut) and axis not in cut for *_, cut in given]
            if any(same):
                differs = differs | _spread(values, group) * torch.tensor(same, device=device)
        told = torch.where(part, shapes, shapes + values)
        most = _reduced(torch.stack([told, -told, differs]), self.everyone)
        alike = (most[0] == -most[1]) & (most[2] == 0)
        if not torch.compiler.is_compiling() and device.type == "cpu" and not is_in_graph():
            self._raise_unless(alike.tolist(), given, values.tolist())
            return
        for (name, *_), same in zip(given, alike.unbind()):
            assert_async(same, DIFFERS.format(name=name))

    def _raise_unless(self, alike: list[bool], given: Sequence[Given], sums: list[int]) -> None:
        """Raise an error that also lists the ranks' inputs. All ranks find the same arguments to differ."""
        for (name, x, _), same, checksum in zip(given, alike, sums):
            if not same:
                mine = f"a {x.dtype} {list(x.shape)} of checksum {checksum & 0xFFFFFF:06x}"
                told: dict[str, list[int]] = {}
                for rank, what in sorted(of_all_ranks((dist.get_rank(), mine), self.mesh)):
                    told.setdefault(what, []).append(rank)
                said = "; ".join(f"{what} on ranks {ranks}" for what, ranks in told.items())
                raise AgreementError(f"{DIFFERS.format(name=name)}. They passed {said}")


def explain_difference(error: RuntimeError) -> None:
    """Raise the difference that a compiled graph found, if it is that in which the graph ended.

    Raises:
        AgreementError: tensors differ.
    """
    if str(error).startswith(DIFFERS.partition("{")[0]) and not isinstance(error, AgreementError):
        raise AgreementError(str(error)) from error


def _spread(x: torch.Tensor, group: str) -> torch.Tensor:
    """1 where the ranks of a group have different numbers, 0 where they have the same."""
    most = _reduced(torch.stack([x, -x]), [group])
    return (most[0] != -most[1]).to(torch.int64)


def _reduced(x: torch.Tensor, groups: Sequence[str]) -> torch.Tensor:
    for group in groups:
        x = torch.ops.dtensor.all_reduce(x, "max", group)
    return x


def _number_of_shape(x: torch.Tensor) -> torch.Tensor:
    number: Any = x.dim()
    for n in x.shape[:6]:
        number = number * 1009 + n
    return torch.full((), number, dtype=torch.int64, device=x.device)


def _checksum(x: torch.Tensor) -> torch.Tensor:
    """A sum weighted by position, which other values or another order are very unlikely to have."""
    flat = (torch.view_as_real(x) if x.is_complex() else x).reshape(-1)
    bits = flat.view(BITS[flat.element_size()]).to(torch.int64)
    return (bits * (torch.arange(bits.shape[0], device=x.device) * 2654435761 + 1)).sum()


USES = "_dtensor_uses"
"""The attribute of a module with a style that counts its calls in eager mode."""


def compare_input(x: torch.Tensor, mesh: DeviceMesh, module: Any) -> None:
    """Compare a plain input of `module` that a style assumes to be the same on all ranks of a one-axis mesh.

    Applies to model inputs and tensors computed under no_grad; for tensors with a history the gradients are compared.

    Raises:
        AgreementError: values were found to differ, on this rank or another one.
    """
    uses = vars(module)[USES] = vars(module).get(USES, -1) + 1
    name = vars(module)[PLANNED].name if PLANNED in vars(module) else ""
    compare(BY_STYLE.format(name or type(module).__name__), x, facts(mesh).groups[(0,)], is_due(uses))


__all__ = ["InputCheck", "compare_input", "explain_difference"]
