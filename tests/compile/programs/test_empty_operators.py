"""Every operator of torch's database in a graph whose sizes are symbols, cut so that the last rank has nothing of a
dimension: what torch compiles for one device compiles and runs, on the first rank and on the last.

One process on a fake group: what is received means nothing, so only the number of dimensions is looked at
(`test_empty_ranks` has values). All of it is an hour of one core: nightly.
"""

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

from dtensor import Replicate, Shard, distribute_tensor, init_device_mesh
from dtensor.testing import fake_ranks
from dtensor.torch_private.core import operator_database

pytestmark = pytest.mark.nightly

PARTS = 32
SAMPLES = 4
"""Of each entry's samples."""
OF_VALUES = "its kernel refuses the values, which a fake group makes up"
BY_POSITIONS = "cuts at positions that are tensors, which torch reads while it compiles"
BY_SYMBOLS = "sizes or steps of a view that are symbols of their own: a guard on them does not hold"
NOT_YET = {
    "lu_solve": OF_VALUES,
    "lu_unpack": OF_VALUES,
    "nn.functional.max_unpool2d": OF_VALUES,
    "nn.functional.max_unpool3d": OF_VALUES,
    "narrow": BY_POSITIONS,
    "tensor_split": BY_POSITIONS,
    "slice_scatter": BY_SYMBOLS,
    "view_copy": BY_SYMBOLS,
}
"""Name of an operator -> why it is left out."""


def differentiated(fn: Any, *given: Any) -> list[int]:
    """How many dimensions the results have, and the gradients of what asks for them."""
    out = [x for x in tree_leaves(fn(*given)) if isinstance(x, torch.Tensor)]
    made = [x for x in out if x.requires_grad and not x.is_complex()]
    if made:
        sum(x.sum() for x in made).backward()
    return [x.dim() for x in (*out, *(g.grad for g in given if isinstance(g, torch.Tensor) and g.grad is not None))]


def ranks_for(n: int) -> int | None:
    """A number of ranks of which the last has nothing of `n`, and some have more than one if that can be."""
    few = next((r for r in range(3, n) if -(-n // r) * (r - 1) >= n), None)
    return few or (n + 1 if n > 1 else None)


def cases(entry: Any) -> Iterator[tuple[Any, int]]:
    """Samples that torch compiles for one device, and dimensions to cut."""
    dtype = torch.float64 if torch.float64 in entry.dtypes else min(entry.dtypes, key=str, default=None)
    if dtype is None or dtype.is_complex:
        return
    for sample in itertools.islice(entry.sample_inputs("cpu", dtype), SAMPLES):
        x = sample.input
        if not isinstance(x, torch.Tensor) or 0 in x.shape:  # of no elements at all kernels refuse some shapes
            continue
        try:
            torch.compiler.reset()
            plain = torch.compile(called(entry, sample), backend="aot_eager", dynamic=True, fullgraph=True)
            differentiated(plain, leaf(x, entry), sample.args, sample.kwargs)
        except Exception:  # torch's own limits
            continue
        yield from ((sample, dim) for dim in range(x.dim()))


def called(entry: Any, sample: Any):
    return lambda x, args, kwargs: entry(x, *args, **kwargs)


def leaf(x: torch.Tensor, entry: Any) -> torch.Tensor:
    return x.detach().clone().requires_grad_(entry.supports_autograd and x.is_floating_point())


@pytest.mark.parametrize("part", range(PARTS))
def test_operators_on_a_rank_without_a_part(part):
    tried, found = 0, []
    for name, entry in list(operator_database().items())[part::PARTS]:
        if entry.name in NOT_YET:
            continue
        for sample, dim in cases(entry):
            n = sample.input.shape[dim]
            ranks = ranks_for(n)
            for rank in (0, ranks - 1) if ranks else ():
                torch.compiler.reset()
                tried += 1
                try:
                    on_rank(entry, sample, dim, ranks, rank)
                except torch.linalg.LinAlgError:  # of the values that a fake group makes up
                    continue
                except Exception as error:  # compilers raise anything
                    found.append(f"{name}: {tuple(sample.input.shape)} cut at {dim}, rank {rank} of {ranks}: {error!r}")
    torch.compiler.reset()
    assert not found, "\n".join(found)
    assert tried, "torch compiled nothing"


def on_rank(entry: Any, sample: Any, dim: int, ranks: int, rank: int) -> None:
    n = sample.input.shape[dim]
    with fake_ranks(ranks, rank), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mesh = init_device_mesh("cpu", (ranks,))

        def placed(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            cut = x.dim() > dim and x.shape[dim] == n
            return distribute_tensor(x, mesh, [Shard(dim) if cut else Replicate()], src_data_rank=None)

        args, kwargs = tree_map(placed, (sample.args, sample.kwargs))
        x = leaf(placed(sample.input), entry)
        options = {"inner": "aot_eager", "agreement": False}
        ours = torch.compile(called(entry, sample), backend="dtensor", dynamic=True, fullgraph=True, options=options)
        found = differentiated(ours, x, args, kwargs)
        assert found == differentiated(called(entry, sample), leaf(sample.input, entry), sample.args, sample.kwargs)
