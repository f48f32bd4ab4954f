"""Sharded models and optimizers in the folders that trainers write: weights as whole files, an optimizer as shards.

folder/model.safetensors   the weights, as any other program reads them (written by the trainer)
folder/optimizer/…         the optimizer, a checkpoint that is read on any number of ranks
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.optim import Optimizer

from ..errors import CheckpointError
from ..state import safetensors
from ..state.checkpoints import Checkpoints

FOLDER = "optimizer"
"""The folder of an optimizer within that of a trainer."""


class _Names(nn.Module):
    """The parameters of a model under their names, without a state of its own: an optimizer is written by these names,
    and the weights are in a file of their own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._modules, self._parameters = model._modules, model._parameters

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {}

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return None


def whole_weights(model: nn.Module) -> dict[str, Any]:
    """The whole weights of a model in the memory of the host, on rank 0; empty on all others. Collective."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def load_weights(model: nn.Module, path: Path) -> None:
    """Reads the weights of a model from a safetensors file or a folder of such files, each rank its shards.

    Raises:
        CheckpointError: the file lacks a parameter, or has one that the model does not have.
    """
    state = model.state_dict()
    missing = safetensors.load(state, path, strict=False)
    found = {id(state[name]) for name in state.keys() - set(missing)}
    lost = [name for name in missing if id(state[name]) not in found and not _is_tied(model, name, missing)]
    if lost:
        raise CheckpointError(f"{path} does not have {', '.join(lost)}; it is of another model")


def _is_tied(model: nn.Module, name: str, missing: list[str]) -> bool:
    """Whether a parameter or buffer has another name that is not missing: files hold tied tensors once."""
    named = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers()])
    return any(x is named.get(name) and n not in missing for n, x in named.items())


def save_optimizers(model: nn.Module, optimizers: list[Optimizer], folder: Path) -> None:
    """Writes optimizers of a model, each rank its shards. Collective.

    Raises:
        CheckpointError: as `Checkpoints.save`.
    """
    Checkpoints(folder / FOLDER).save(_state(model, optimizers), step=0)


def load_optimizers(model: nn.Module, optimizers: list[Optimizer], folder: Path) -> None:
    """Reads what `save_optimizers` has written, on any number of ranks, sharded in any way. Collective.

    Raises:
        CheckpointError: as `Checkpoints.load`.
    """
    Checkpoints(folder / FOLDER).load(_state(model, optimizers))


def _state(model: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
    return {"model": _Names(model), "optimizers": optimizers}


__all__ = ["load_optimizers", "load_weights", "save_optimizers", "whole_weights"]
