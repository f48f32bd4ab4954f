"""Functions of whole matrices that are sharded: each matrix is worked on once, by the rank that owns it meanwhile."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ...errors import ArgumentError, ArgumentTypeError, shown
from ...layout.placements import Placement, Replicate, Shard
from ...tensor.tensor import DTensor

Item = tuple[torch.Tensor, ...]


@torch.no_grad()
def map_matrices(function: Callable[..., Any], *lists: Sequence[torch.Tensor]) -> Any:
    """Apply a function to whole matrices, such as the iterations of Muon, Shampoo or SOAP, each of them on one rank.

    `[function(a, b) for a, b in zip(*lists)]`, of DTensors on their shards. As many matrices of one kind as the mesh
    has ranks are exchanged at once: every rank sends its shards of all of them in one all-to-all, receives one matrix
    whole, computes, and the results go back in another. So a rank computes a share of 1/n of the matrices, rounded up
    for each kind (shape, dtype, placements), and sends (n-1)/n of its shards each way; ranks for which none is left of
    a kind are sent one again, as an exchange gives each rank one. Over an axis that replicates the
    matrices nothing needs to be sent before, and the results are gathered. What is computed are the same operators on
    the same whole matrices as on one device, so results have the same bits.

    Cast matrices before, not in `function`, if it computes in a smaller dtype: they are sent as they are given. In
    eager mode the exchanges of later matrices run while earlier ones are computed; in a compiled graph the passes see
    to that.

    Args:
        function: from one tensor of each list, whole, to a tensor of the shape of the first, or to a tuple of tensors
            of the shapes of all of them in order. It must not communicate, and is called equally often on all ranks.
        lists: matrices, or tensors of more dims, as many in each list; DTensors in any placements, or plain tensors.

    Returns:
        The results in the order of the matrices, in their placements (replicated where these are partial), without
        gradients; where `function` returns tuples, a tuple of such lists.

    Raises:
        ValueError: the lists have different lengths, or there is none; a result has another shape than its argument;
            the tensors of one item are on different meshes, or only some of them are DTensors.
        TypeError: an item is not a tensor.
    """
    items = list(_items(lists))
    found: list[Any] = [None] * len(items)
    kinds: dict[Any, list[int]] = {}
    for k, item in enumerate(items):
        if isinstance(item[0], DTensor):
            kinds.setdefault(_kind(item), []).append(k)
        else:
            found[k] = _checked(function(*item), item)
    turns = [_Turn(items, turn) for places in kinds.values() for turn in _turns(places, items)]
    for turn in turns:
        turn.send()
    for turn in turns:
        turn.compute(function)
    for turn in turns:
        for k, result in turn.received():
            found[k] = result
    if found and all(isinstance(result, tuple) for result in found):
        return tuple([list(results) for results in zip(*found)])
    return found


class _Turn:
    """Matrices of one kind, no more than there are ranks to own them."""

    def __init__(self, items: list[Item], places: list[int]) -> None:
        self.places, self.items = places, [items[k] for k in places]
        like: Any = self.items[0]
        self.mesh: DeviceMesh = like[0].device_mesh
        self.back = [[Replicate() if p.is_partial() else _later(p) for p in x.placements] for x in like]
        self.whole: list[Any] = []

    def send(self) -> None:
        """Start to exchange the shards for whole matrices. A rank without a matrix of its own is given one again."""
        fill = [self.items[k % len(self.items)] for k in range(self.mesh.size())]
        self.target = [Shard(0)] * self.mesh.ndim
        for tensors in zip(*fill):
            self.whole.append(torch.stack(tensors).redistribute(placements=self.target, async_op=_is_eager()))  # pyright: ignore

    def compute(self, function: Callable[..., Any]) -> None:
        """Compute this rank's matrix, and start to exchange the results for shards of all of them."""
        own = tuple([x.to_local()[0] for x in self.whole])
        result = _checked(function(*own), own)
        self.single = not isinstance(result, tuple)
        self.results = [
            DTensor.from_local(y.unsqueeze(0), self.mesh, self.target).redistribute(
                placements=back, async_op=_is_eager()
            )
            for y, back in zip((result,) if self.single else result, self.back)
        ]
        self.whole = []

    def received(self) -> Iterator[tuple[int, Any]]:
        """Yield the number of each matrix, and its result."""
        parts = [y.unbind(0) for y in self.results]
        for k, place in enumerate(self.places):
            yield place, parts[0][k] if self.single else tuple([p[k] for p in parts])


def _is_eager() -> bool:
    return not torch.compiler.is_compiling()


def _later(p: Placement) -> Placement:
    return Shard(p.dim + 1) if isinstance(p, Shard) else p


def _turns(places: list[int], items: list[Item]) -> Iterator[list[int]]:
    like: Any = items[places[0]]
    owners = like[0].device_mesh.size()
    for k in range(0, len(places), owners):
        yield places[k : k + owners]


def _kind(item: Any) -> Any:
    return item[0].device_mesh, tuple([(tuple(x.shape), x.dtype, tuple(x.placements)) for x in item])


def _items(lists: tuple[Sequence[torch.Tensor], ...]) -> Iterator[Item]:
    if not lists or len({len(given) for given in lists}) != 1:
        lengths = ", ".join([str(len(given)) for given in lists]) or "none"
        raise ArgumentError(
            f"map_matrices takes lists of one length, a tensor of each for every call of the function; got {lengths}"
        )
    for item in zip(*lists):
        for x in item:
            if not isinstance(x, torch.Tensor):
                raise ArgumentTypeError(f"map_matrices takes lists of tensors; one holds {shown(x)}")
        sharded = [x for x in item if isinstance(x, DTensor)]
        if sharded and (len(sharded) < len(item) or any(x.device_mesh != sharded[0].device_mesh for x in sharded)):
            raise ArgumentError(
                "the tensors of one call of the function are on different meshes, or only some of them are DTensors; "
                "write distribute_tensor(x, mesh, placements) with the mesh of the matrix for the others"
            )
        yield item


def _checked(result: Any, item: Item) -> Any:
    wanted = item if isinstance(result, tuple) else item[:1]
    made = result if isinstance(result, tuple) else (result,)
    shapes = [tuple(y.shape) if isinstance(y, torch.Tensor) else shown(y) for y in made]
    if shapes != [tuple(x.shape) for x in wanted]:
        raise ArgumentError(
            f"the function of map_matrices returns a tensor of the shape of its first argument, or a tuple with one of "
            f"the shape of each: {[list(x.shape) for x in item]}; it returned {shapes}"
        )
    return result


__all__ = ["map_matrices"]
