"""call: overhead of calling a compiled model, compared with plain local tensors, by its number of parameters.

The model adds its parameters to its input; all are tensors of four elements. AOTAutograd compiles it to graphs that run
operator by operator. So all sides do the same local work, and their time beyond that of the plain side is the overhead.
It runs in one process on a fake process group. "call" is a forward that autograd records. "guards" is Dynamo's part
of it: the same call without grad, with a backend whose compiled code does nothing.
"""

from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.distributed import tensor as theirs

import dtensor as ours
from dtensor.testing import fake_ranks

from ..effort import Effort
from ..record import OURS, Record, Setting
from ..timing import compared, interleaved, quartiles

PLAIN, TORCH = "plain", "torch compiled"
AMOUNTS = {"tiny": ((3,), 2, 2), "quick": ((10, 100, 1000), 15, 20), "full": ((10, 100, 1000), 31, 50)}
"""Numbers of parameters, rounds, calls in a round."""


class Sum(nn.Module):
    """A sum of parameters."""

    def __init__(self, parameters: list[torch.Tensor]):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(p) for p in parameters])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for w in self.weights:
            x = x + w
        return x


def one_of_its_own(parameters: list[torch.Tensor]) -> Sum:
    """Return a model with a code object of its own: Dynamo caches compiled code by code object, and checks the guards
    of all entries one after the other."""
    forward: Any = Sum.forward
    copied = FunctionType(forward.__code__.replace(), forward.__globals__, "forward")
    return type("Sum", (Sum,), {"forward": copied})(parameters)


def nothing(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
    """A torch.compile backend whose compiled code does nothing."""
    result = gm(*inputs)
    return lambda *_: result


BACKENDS: dict[str, dict[str, Any]] = {
    OURS: {"backend": "dtensor", "options": {"inner": "aot_eager", "agreement": False}},
    TORCH: {"backend": "aot_eager"},
    PLAIN: {"backend": "aot_eager"},
}


def calls(side: str, count: int, device: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return the call of a side, and the call that only checks guards."""
    mesh = ours.init_device_mesh(device, (2,))
    lib: Any = {OURS: ours, TORCH: theirs}.get(side)

    def placed() -> torch.Tensor:
        x = torch.ones(4, device=device)
        return x if lib is None else lib.distribute_tensor(x, mesh, [lib.Replicate()])

    x = placed()
    whole = torch.compile(one_of_its_own([placed() for _ in range(count)]), fullgraph=True, **BACKENDS[side])
    guarded = torch.compile(one_of_its_own([placed() for _ in range(count)]), fullgraph=True, backend=nothing)
    return lambda: whole(x), torch.no_grad()(lambda: guarded(x))


def run(effort: Effort) -> Iterator[Record]:
    """Yield records for each number of parameters."""
    counts, rounds, turns = effort.of(AMOUNTS)
    for count in effort.progress(counts, "call"):
        torch.compiler.reset()
        with fake_ranks(2):
            made = {side: calls(side, count, effort.device) for side in BACKENDS}
            for index, figure in enumerate(("call", "guards")):
                runs = {side: pair[index] for side, pair in made.items()}
                interleaved(runs, 2)
                times = interleaved(runs, rounds, turns)
                over = {s: [a - b for a, b in zip(times[s], times[PLAIN])] for s in (OURS, TORCH)}
                at, plain = Setting("call", f"{count} parameters"), 1e6 * quartiles(times[PLAIN])[1]
                note = f"a call on plain tensors takes {plain:.1f} µs"
                yield at.timed(
                    f"{figure} over plain tensors", "µs", compared(over[OURS], over[TORCH], 1e6), TORCH, note=note
                )
                yield at.timed(f"{figure} in all", "µs", compared(times[OURS], times[TORCH], 1e6), TORCH)
                yield at.timed(f"{figure} in all", "µs", compared(times[OURS], times[PLAIN], 1e6), PLAIN)


__all__ = ["run"]
