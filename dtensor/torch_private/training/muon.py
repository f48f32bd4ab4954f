"""Private functions of `torch.optim.Muon`, and a change to it: its step for parameters that it is not made for."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..core import never_traced as _never_traced  # noqa: F401 (first: the version of torch is checked there)

# isort: split
from torch.optim import _muon
from torch.optim._muon import _adjust_lr as adjusted_rate
from torch.optim._muon import _zeropower_via_newtonschulz as orthogonalized
from torch.optim.optimizer import _to_scalar as to_scalar


def step_with(step: Callable[..., None], concerns: Callable[[list[Tensor]], bool]) -> None:
    """Let Muon call `step`, with the arguments of torch's own, for the groups whose parameters `concerns`."""
    own = _muon._single_tensor_muon

    def single_tensor_muon(params: list[Tensor], grads: list[Tensor], buffers: list[Tensor], **given: Any) -> None:
        (step if concerns(params) else own)(params, grads, buffers, **given)

    _muon._single_tensor_muon = single_tensor_muon


__all__ = ["adjusted_rate", "orthogonalized", "step_with", "to_scalar"]
