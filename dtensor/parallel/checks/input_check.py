"""Checks whether all ranks pass the same inputs to a model. There are two checks.

`distribute_model` knows all inputs and compares them in each call, eager and compiled: each rank sends a few numbers, a
checksum of each input and one of its shape, to all others. Along axes that shard an input, all parts must have one
shape; along the others it must have the same values. All ranks of the mesh learn of a difference anywhere, so that all
raise and none is left waiting. The check runs on the device of the inputs, and on a GPU nothing waits for the result.
In a compiled graph two operators are around the exchange, which travels behind the first collective of the model:
`dtensor.passes.overlap.beside` puts it there.

A style knows which inputs it assumes to be Replicate(). In eager mode it compares them from time to time
(`dtensor.comm.replication_check`); in compiled code the graph compares them.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ...comm.compared_inputs import DIFFERS, alike
from ...comm.from_plain import of_all_ranks
from ...comm.replication_check import BY_STYLE, compare, is_due
from ...errors import AgreementError
from ...job.groups import group_ranks, group_size
from ...mesh.mesh import facts
from ...torch_private.core import assert_async, is_in_graph, never_traced
from .size_misfit import PLANNED

Given: TypeAlias = tuple[str, torch.Tensor, Sequence[int]]
"""The name of an argument, this rank's tensor, and the mesh axes over which that is a shard."""


class InputCheck:
    """Compares inputs over a mesh."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh: DeviceMesh = mesh
        known = facts(mesh)
        axes = [a for a in range(mesh.ndim) if known.shape[a] > 1 and known.coordinate is not None]
        self.shape: dict[int, int] = {a: known.shape[a] for a in axes}
        """Axis -> its number of ranks; axes of one rank are left out."""
        whole = known.groups.get(tuple(axes))
        in_order = whole is not None and list(group_ranks(whole)) == mesh.mesh.flatten().tolist()
        groups = [whole] if in_order and whole is not None else [known.groups[(a,)] for a in axes[::-1]]
        self.gathers: list[tuple[str, int]] = [(group, group_size(group)) for group in groups]
        """Groups over which to gather, one after the other, so that ranks arrive in the order of the mesh; and their
        numbers of ranks."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "InputCheck":
        return self

    @never_traced
    def __call__(self, given: Sequence[Given]) -> None:
        """Compare the tensors of all ranks.

        Raises:
            AgreementError: tensors differ; raised on all ranks of the mesh. With the backend "inductor" it is a
                RuntimeError of the same text.
        """
        if not given or not self.shape:
            return
        mine = gathered = torch.ops.dtensor.input_numbers([x.detach() for _, x, _ in given])
        for group, n in self.gathers:
            gathered = torch.ops.dtensor.all_gather(gathered, 0, gathered.shape[0] * n, group)
        shape, place = list(self.shape.values()), {a: i for i, a in enumerate(self.shape)}
        cut = [sum([1 << place[a] for a in axes if a in place]) for *_, axes in given]
        if not torch.compiler.is_compiling() and gathered.device.type == "cpu" and not is_in_graph():
            self._raise_unless(alike(gathered, shape, cut), given, mine.tolist())
            return
        found = torch.ops.dtensor.inputs_alike(gathered, shape, cut, [name for name, *_ in given])
        for (name, *_), same in zip(given, found.unbind()):
            assert_async(same, DIFFERS.format(name=name))

    def _raise_unless(self, found: torch.Tensor, given: Sequence[Given], sums: list[int]) -> None:
        """Raise an error that also lists the ranks' inputs. All ranks find the same arguments to differ."""
        for (name, x, _), same, checksum in zip(given, found.tolist(), sums):
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
