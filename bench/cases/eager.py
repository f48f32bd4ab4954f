"""eager: the time of one operator on DTensors, not compiled, by family of operators.

It runs in one process on a fake process group, with operators that need no communication, so that it measures dispatch.
Tensors are 16×16, or 4×4×16 for an operator on three dims, and sharded on dim 0; weights are replicated.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed import tensor as theirs

import dtensor as ours
from dtensor.testing import fake_ranks

from ..effort import Effort
from ..record import Record, Setting
from ..timing import compared, interleaved

TORCH, PLAIN = "torch eager", "plain"
AMOUNTS = {"tiny": (2, 5), "quick": (15, 400), "full": (31, 2000)}
"""Rounds, calls in a round."""

Operator = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], Any]

FAMILIES: dict[str, dict[str, Operator]] = {
    "pointwise": {
        "relu": lambda x, y, w, i: torch.relu(x),
        "add": lambda x, y, w, i: x + x,
        "add to a number": lambda x, y, w, i: x + 1.0,
        "add in place": lambda x, y, w, i: x.add_(0.0),
        "gelu": lambda x, y, w, i: F.gelu(x),
        "cast": lambda x, y, w, i: x.to(torch.float64),
    },
    "product": {
        "mm": lambda x, y, w, i: x @ w,
        "linear": lambda x, y, w, i: F.linear(y, w),
        "bmm": lambda x, y, w, i: torch.bmm(y, y.transpose(1, 2)),
    },
    "reduction": {
        "sum": lambda x, y, w, i: x.sum(),
        "mean of a dim": lambda x, y, w, i: x.mean(1),
        "softmax": lambda x, y, w, i: torch.softmax(x, 1),
        "layer norm": lambda x, y, w, i: F.layer_norm(x, (16,)),
    },
    "view": {
        "view": lambda x, y, w, i: x.view(-1, 4, 4),
        "transpose": lambda x, y, w, i: x.t(),
        "unsqueeze": lambda x, y, w, i: x.unsqueeze(1),
        "chunk": lambda x, y, w, i: x.chunk(2, 1),
    },
    "index": {
        "embedding": lambda x, y, w, i: F.embedding(i, w),
        "slice": lambda x, y, w, i: x[:, 2:8],
        "cat": lambda x, y, w, i: torch.cat([x, x], 1),
    },
    "create": {
        "zeros_like": lambda x, y, w, i: torch.zeros_like(x),
        "clone": lambda x, y, w, i: x.clone(),
    },
}
"""Family -> functions of x and y, which are sharded, of a weight w, and of sharded indices i."""


def tensors(lib: Any, mesh: Any, device: str) -> tuple[torch.Tensor, ...]:
    """Return the arguments of operators, as tensors of library `lib`; if it is None, plain tensors with the size of the
    shards."""
    torch.manual_seed(0)
    whole = [torch.randn(16, 16), torch.randn(4, 4, 16), torch.randn(16, 16), torch.arange(16)]
    places = [(t.to(device), None if t is whole[2] else 0) for t in whole]
    if lib is None:
        return tuple([t if dim is None else t.chunk(2)[0].clone() for t, dim in places])
    made = [(t, [lib.Replicate() if dim is None else lib.Shard(dim)]) for t, dim in places]
    return tuple([lib.distribute_tensor(t, mesh, p) for t, p in made])


def run(effort: Effort) -> Iterator[Record]:
    """Yield records of each operator."""
    rounds, calls = effort.of(AMOUNTS)
    jobs = [(family, name) for family, operators in FAMILIES.items() for name in operators]
    with fake_ranks(2):
        mesh = ours.init_device_mesh(effort.device, (2,))
        given = {
            side: tensors(lib, mesh, effort.device) for side, lib in (("dtensor", ours), (TORCH, theirs), (PLAIN, None))
        }
        for family, name in effort.progress(jobs, "eager"):
            operator, at = FAMILIES[family][name], Setting("eager", family)
            runs = {side: lambda xs=xs, operator=operator: operator(*xs) for side, xs in given.items()}
            try:
                runs[TORCH]()
            except Exception as error:  # the failure of a peer is a result
                runs.pop(TORCH)
                yield at.missing(name, f"{name}: {type(error).__name__}: {error}".split("\n")[0][:300], TORCH)
            interleaved(runs, 2, max(1, calls // 10))
            times = interleaved(runs, rounds, calls)
            for peer in runs:
                if peer != "dtensor":
                    yield at.timed(name, "µs", compared(times["dtensor"], times[peer], 1e6), peer)


__all__ = ["run"]
