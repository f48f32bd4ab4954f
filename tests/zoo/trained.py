"""Ten steps of training, to compare with those of one device."""

from collections.abc import Callable
from typing import Any

import torch

STEPS = 10


def trained(model: Any, run: Any, batch: Callable[[int], dict[str, torch.Tensor]], cut: Any = lambda x: x) -> list[Any]:
    """The loss of each step, and the parameters at the end.

    Args:
        model: whose parameters are updated.
        run: the model, or what was compiled of it.
        batch: the arguments of a step, by its number.
        cut: what each of them is given as.
    """
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(STEPS):
        loss = run(**{name: cut(x) for name, x in batch(step).items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    found = [*losses, *[p.detach() for p in model.parameters()]]
    return [getattr(x, "full_tensor", lambda x=x: x)() for x in found]
