"""An `Accelerator` for models that dtensor has sharded: it leaves them as they are, and knows who reads the same batch.

The processes of accelerate are here the parts of a batch: `num_processes` is how many there are, and `gather`, `reduce`
and loaders are over them. Saving and loading are collective; weights are written as one whole file, and the optimizer
as a checkpoint that any number of ranks can read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import torch.distributed as dist
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import recursively_apply
from torch import nn

from ..errors import ArgumentError, CallOrderError
from ..parallel.training.clip_grad_norm import clip_grad_norm_
from .batches import BatchParts, batch_parts, gradients_unreduced, is_sharded
from .saved_state import FOLDER, load_optimizers, load_weights, save_optimizers, whole_weights


class Accelerator(accelerate.Accelerator):
    """`accelerate.Accelerator` for a model that was sharded before `prepare`. Models that are not sharded are treated
    as by accelerate.

    Give `prepare` the model before the loaders, or with them: which part of a batch a rank reads follows from it.
    """

    _parts: BatchParts | None = None
    _sharded: tuple[nn.Module, ...] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_load_state_pre_hook(self._load)

    @classmethod
    def of(cls, accelerator: accelerate.Accelerator, model: nn.Module) -> None:
        """Makes an `Accelerator` of one that somebody else has created, if `model` is sharded."""
        if is_sharded(model):
            accelerator.__class__ = cls
            made: Any = accelerator
            made.register_load_state_pre_hook(made._load)
            made.adopt(model)

    def adopt(self, model: nn.Module) -> None:
        """Takes the parts of a batch from a sharded model.

        Raises:
            ValueError: another model was given before, which divides batches in another way.
            MeshError, PlacementError: as `batch_parts`.
        """
        parts = batch_parts(model)
        if self._parts is not None and (self._parts.count, self._parts.index) != (parts.count, parts.index):
            raise ArgumentError(
                f"the models of an Accelerator read the same parts of a batch; this one has {parts.count} and the one "
                f"before {self._parts.count}. Write an Accelerator for each"
            )
        self._parts = parts
        if all(model is not known for known in self._sharded):
            self._sharded = (*self._sharded, model)

    @property
    def num_processes(self) -> int:
        """The number of parts of a batch."""
        return self.state.num_processes if self._parts is None else self._parts.count

    @property
    def process_index(self) -> int:
        """Which part of a batch this rank reads."""
        return self.state.process_index if self._parts is None else self._parts.index

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """As `accelerate.Accelerator.prepare`."""
        for given in args:
            if isinstance(given, nn.Module) and is_sharded(given):
                self.adopt(given)
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Autocast and `torch.compile`, as accelerate was asked to; a sharded model is not wrapped or moved."""
        if not is_sharded(model):
            return super().prepare_model(model, device_placement, evaluation_mode)
        self.adopt(model)
        return super().prepare_model(model, device_placement=False, evaluation_mode=True)

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """A loader of this rank's part of each batch.

        Raises:
            RuntimeError: no model was prepared before.
        """
        if self._parts is None and not self._models and dist.is_initialized():
            raise CallOrderError(
                "which part of a batch a rank reads follows from the model, and none was prepared; prepare it before a "
                "loader, or both in one call: accelerator.prepare(model, optimizer, loader)"
            )
        return super().prepare_data_loader(data_loader, *args, **kwargs)

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """As accelerate; the state of an optimizer of sharded parameters is written and read by `save_state` alone."""
        prepared = super().prepare_optimizer(optimizer, device_placement)
        if self._sharded:
            prepared.__class__ = _Optimizer
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """As accelerate: a scheduler takes a step for each part of a batch, since loaders are as many times shorter."""
        prepared: Any = super().prepare_scheduler(scheduler)
        if self._parts is not None:
            prepared.__class__ = _Scheduler
            prepared.parts = 1 if prepared.split_batches else self._parts.count
            prepared.split_batches = True
        return prepared

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Gradients of fully sharded parameters are not reduced by the backwards within."""
        with gradients_unreduced(model) if is_sharded(model) else super().no_sync(model):
            yield

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: Any = 2) -> Any:
        """`dtensor.parallel.clip_grad_norm_`: the norm of all gradients on all ranks."""
        if self._parts is None:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        self.unscale_gradients()
        return clip_grad_norm_(parameters, max_norm, norm_type)

    def gather(self, tensor: Any) -> Any:
        """The parts of tensors, concatenated; ranks that read the same batch count once."""
        if self._parts is None:
            return super().gather(tensor)
        return recursively_apply(self._parts.gather, tensor, error_on_other_type=True)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum or mean over the parts of a batch."""
        if self._parts is None:
            return super().reduce(tensor, reduction, scale)
        parts = self._parts
        return recursively_apply(
            lambda x: (x if reduction == "none" else parts.reduce(x, reduction)) * scale,
            tensor,
            error_on_other_type=True,
        )

    def check_trigger(self) -> bool:
        """Whether any process has set the trigger, those that read the same batch included."""
        parts, self._parts = self._parts, None
        try:
            return super().check_trigger()
        finally:
            self._parts = parts

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The whole weights, on the first rank; empty on the others. Every rank calls it."""
        if not is_sharded(model):
            return super().get_state_dict(model, unwrap)
        return whole_weights(self.unwrap_model(model, keep_torch_compile=False))

    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """As accelerate; the optimizers are written to `output_dir/optimizer`, as shards. Every rank calls it."""
        folder = super().save_state(output_dir, safe_serialization, **kwargs)
        if self._sharded:
            save_optimizers(self._all_sharded(), self._inner_optimizers(), Path(folder))
        return folder

    def _load(self, models: list[nn.Module], folder: str) -> None:
        """Read sharded models and optimizers, and leave the rest to accelerate."""
        sharded = [model for model in models if is_sharded(model)]
        if not sharded:
            return
        for i, model in enumerate(models):
            if is_sharded(model):
                file = Path(folder) / (f"model_{i}.safetensors" if i else "model.safetensors")
                load_weights(self.unwrap_model(model, keep_torch_compile=False), file)
        models[:] = [model for model in models if not is_sharded(model)]
        load_optimizers(self._all_sharded(), self._inner_optimizers(), Path(folder))

    def _all_sharded(self) -> nn.Module:
        """The sharded models as one, whose parameters have all names that the optimizers know."""
        return self._sharded[0] if len(self._sharded) == 1 else nn.ModuleList(self._sharded)

    def _inner_optimizers(self) -> list[Any]:
        return [optimizer.optimizer for optimizer in self._optimizers]


class _Optimizer(AcceleratedOptimizer):
    """An optimizer whose state is not that of one rank, so that files written by one rank do not hold it."""

    def state_dict(self) -> dict[str, Any]:
        return {"state": {}, "param_groups": [], "is in the folder": FOLDER}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict.get("state"):
            raise ArgumentError(
                "this is the state of an optimizer on one device; the state of an optimizer of sharded parameters is "
                f"in the folder {FOLDER!r} that Accelerator.save_state and ShardedTrainer write, and is read by them"
            )


class _Scheduler(AcceleratedScheduler):
    """A scheduler that takes a step for each part of a batch."""

    parts: int

    def step(self, *args: Any, **kwargs: Any) -> None:
        for _ in range(self.parts if self.step_with_optimizer and self.gradient_state.sync_gradients else 1):
            super().step(*args, **kwargs)


__all__ = ["Accelerator"]
