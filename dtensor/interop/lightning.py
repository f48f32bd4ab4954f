"""A Lightning strategy for models that dtensor has sharded.

The launcher, the process group and precision are those of Lightning's DDPStrategy. A checkpoint `x.ckpt` is the file
that one device would write, without the optimizer, which is in the folder `x.ckpt.shards` beside it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from ..parallel.training.clip_grad_norm import clip_grad_norm_
from .batches import BatchParts, batch_parts, gradients_unreduced, is_sharded
from .saved_state import load_optimizers, save_optimizers, whole_weights

SHARDS = ".shards"
"""What the folder of a checkpoint's optimizers adds to the name of its file."""


class ShardedStrategy(DDPStrategy):
    """`Trainer(strategy=ShardedStrategy())` for modules with a model that `distribute_model`, `parallelize_module` or
    `fully_shard` has sharded, before `fit` or in `configure_model`.

    Loaders read this rank's part of each batch; `self.log(..., sync_dist=True)` and `self.all_gather` are over the
    parts. A module that is not sharded is trained with DistributedDataParallel. Takes the arguments of `DDPStrategy`.
    """

    _file: Path | None = None

    @property
    def _module(self) -> nn.Module:
        assert self.lightning_module is not None, "the strategy has no module yet"
        return self.lightning_module

    @property
    def _parts(self) -> BatchParts | None:
        """The parts of a batch, if the module is sharded."""
        return batch_parts(self._module) if is_sharded(self._module) else None

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Into how many parts loaders divide a batch, and which is this rank's."""
        parts = self._parts
        if parts is None:
            return super().distributed_sampler_kwargs
        return {"num_replicas": parts.count, "rank": parts.index}

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def setup(self, trainer: Any) -> None:
        """As DDPStrategy, but a sharded module is neither wrapped, nor moved, nor broadcast."""
        if not is_sharded(self._module):
            super().setup(trainer)
            return
        assert self.accelerator is not None, "Lightning gives a strategy its accelerator"
        assert self.model is not None, "and its module"
        batch_parts(self._module)  # raises where parts do not follow from the module
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        vars(self.precision_plugin)["clip_grad_by_norm"] = functools.partial(_clipped, self.precision_plugin)

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Gradients of fully sharded parameters are not reduced by the backwards within."""
        with gradients_unreduced(self._module) if self._parts else super().block_backward_sync():
            yield

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """A sum or mean over the parts of a batch; over `group`, if one is given."""
        parts = self._parts
        if parts is None or group is not None or not isinstance(tensor, torch.Tensor):
            return super().reduce(tensor, group, reduce_op)
        return parts.reduce(tensor, "mean" if str(reduce_op).lower() in ("mean", "avg", "redoptype.avg") else "sum")

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks, or any, have decided so: those that read the same batch, too."""
        count = int(super().reduce(torch.tensor(int(decision), device=self.root_device), reduce_op="sum"))
        return count == self.world_size if all else count > 0

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """The parts of a tensor, stacked along a new dim 0; over `group`, if one is given or gradients are wanted."""
        parts = self._parts
        if parts is None or group is not None or sync_grads:
            return super().all_gather(tensor, group, sync_grads)
        return parts.gather(tensor[None])

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole weights, on the first rank; empty on the others."""
        return whole_weights(self._module) if self._parts else super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Nothing: the state of a sharded optimizer is written by `save_checkpoint`."""
        return {} if self._parts else super().optimizer_state(optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Writes the file on the first rank, and the optimizers beside it, each rank its shards."""
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self._parts and "optimizer_states" in checkpoint:
            save_optimizers(self._module, self.optimizers, _shards(self.broadcast(filepath)))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Reads the file; `load_optimizer_state_dict` reads what is beside it."""
        self._file = Path(os.fspath(checkpoint_path))
        return super().load_checkpoint(checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Gives each rank its shards of the weights in a checkpoint."""
        if self._parts is None:
            super().load_model_state_dict(checkpoint, strict)
            return
        options = StateDictOptions(full_state_dict=True, strict=strict)
        set_model_state_dict(self._module, dict(checkpoint["state_dict"]), options=options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Reads the optimizers that are beside the file that was read last."""
        if self._parts is None:
            super().load_optimizer_state_dict(checkpoint)
            return
        assert self._file is not None, "no checkpoint was loaded"
        load_optimizers(self._module, self.optimizers, _shards(self._file))

    def remove_checkpoint(self, filepath: Any) -> None:
        """Removes a checkpoint with what is beside it."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(_shards(filepath), ignore_errors=True)


def _shards(file: Any) -> Path:
    """The folder beside a checkpoint's file."""
    path = Path(os.fspath(file))
    return path.with_name(path.name + SHARDS)


def _clipped(plugin: Any, optimizer: Any, clip_val: float) -> None:
    clip_grad_norm_(list(plugin.main_params(optimizer)), clip_val)


__all__ = ["ShardedStrategy"]
