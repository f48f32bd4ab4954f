"""Moves between meshes: redistribute a tensor to another mesh, over the same ranks, some of them, or different ones.

Every rank holds one box of the global tensor before the move and one after it. All ranks derive from the boxes alone
which rank sends which part of its box to which other rank. A part that a rank already holds is copied, and if several
ranks hold the same box they take turns as senders. The parts are sent in one all-to-all with uneven splits, over a
group that spans both meshes (`dtensor.mesh.mesh.group_between`), or not at all if no rank needs any. Eager mode only:
each rank sends different parts, so graphs would differ between ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

import torch

from ..job.groups import group_rank, group_ranks
from ..layout.chunks import note_place
from ..layout.layout import Layout
from ..mesh.mesh import group_between, mesh_shape
from ..mesh.tensor_spec import Spec
from ..torch_private.core import c10d
from .pending_tensor import waited
from .redistribute import plan_of, redistribute_local
from .start_collectives import starts

Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Part:
    """A part of the tensor that one rank sends to another.

    Attributes:
        sender, receiver: Global ranks.
        box: The (begin, end) range of the part along each dimension of the global tensor.
    """

    sender: int
    receiver: int
    box: Box

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod([end - begin for begin, end in self.box])


def exchanged(local: torch.Tensor, src: Spec, dst: Spec) -> torch.Tensor:
    """Move a tensor from the mesh and layout of `src` to those of `dst`. Every rank of both meshes calls this.

    Partial axes are first reduced on the mesh of `src`.

    Args:
        local: This rank's local tensor of `src`.
        src: The spec before.
        dst: The spec after, of the same global tensor.

    Returns:
        This rank's local tensor of `dst`; an empty tensor on a rank outside the mesh of `dst`.

    Raises:
        MeshError: There is no process group over the ranks of both meshes.
    """
    note_place()
    final = _without_partial(src)
    local = waited(redistribute_local(local, src, final))
    src = src.with_layout(final)
    before, after = boxes(src), boxes(dst)
    parts = list(handed_over(before, after))
    if all(p.sender == p.receiver for p in parts):
        group, me, ranks = None, torch.distributed.get_rank(), (torch.distributed.get_rank(),)
    else:
        group = group_between(src.mesh, dst.mesh)
        if group is None:
            return local.new_empty(0)
        ranks = group_ranks(group)
        me = ranks[group_rank(group)]
    sent = {p.receiver: p for p in parts if p.sender == me}
    got = sorted([p for p in parts if p.receiver == me], key=lambda p: ranks.index(p.sender))
    pieces = [local[_within(sent[r].box, before[me])].reshape(-1) for r in ranks if r in sent]
    flat = torch.cat(pieces) if pieces else local.new_empty(0)
    if group is not None:
        # Sent as bytes, which every backend supports.
        here, width = {p.sender: p.elements for p in got}, flat.element_size()
        there = [width * sent[r].elements if r in sent else 0 for r in ranks]
        sizes = [width * here.get(r, 0) for r in ranks]
        start = starts(group, flat.device).all_to_all
        flat = c10d.wait_tensor(start(_bytes(flat), sizes, there, group)).view(flat.dtype)
    if me not in after:
        return local.new_empty(0)
    made = local.new_empty([end - begin for begin, end in after[me]])
    for part, values in zip(got, flat.split([p.elements for p in got])):
        place = _within(part.box, after[me])
        made[place] = values.view(made[place].shape)
    return made


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).view(torch.uint8).flatten()


def boxes(spec: Spec) -> dict[int, Box]:
    """Rank -> the box of the global tensor that it holds."""
    mesh, sizes = spec.mesh, mesh_shape(spec.mesh)
    ranks = mesh.mesh.flatten().tolist()
    return {r: spec.layout.local_box(spec.shape, sizes, at) for r, at in zip(ranks, product(*map(range, sizes)))}


def handed_over(before: dict[int, Box], after: dict[int, Box]) -> Iterator[Part]:
    """The parts that make up every box of `after`, at most one from any rank to another."""
    holders: dict[Box, list[int]] = {}
    for rank, box in before.items():
        holders.setdefault(box, []).append(rank)
    for turn, (receiver, wanted) in enumerate(after.items()):
        for box, ranks in holders.items():
            common = tuple([(max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, wanted)])
            if all(begin < end for begin, end in common):
                yield Part(receiver if before.get(receiver) == box else ranks[turn % len(ranks)], receiver, common)


def _within(part: Box, box: Box) -> tuple[slice, ...]:
    return tuple([slice(begin - start, end - start) for (begin, end), (start, _) in zip(part, box)])


def _without_partial(spec: Spec) -> Layout:
    """The cheapest layout to reduce to: with all partial axes replicated, or all sharding the same dimension."""
    partial = [axis for axis, _ in spec.layout.partial]
    if not partial:
        return spec.layout
    choices = [spec.layout.without_partial()]
    for dim in range(spec.ndim):
        made = spec.layout
        for axis in partial:
            made = made.moved(axis, dim=dim)
        choices.append(made)
    return min(choices, key=lambda layout: plan_of(spec, layout).seconds)


__all__ = ["Part", "boxes", "exchanged", "handed_over"]
