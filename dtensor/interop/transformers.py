"""transformers' `Trainer` for models that dtensor has sharded; TRL's trainers and others that derive from it, likewise.

Overridden methods say what a Trainer cannot know: nobody wraps the model, ranks of a tensor parallel axis read the same
batch, the loss of a global view is that of all parts already, and what is written is whole.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import nn

from ..errors import ArgumentError, ArgumentTypeError
from ..parallel.modules.model_methods import is_taught
from ..tensor.tensor import DTensor
from .accelerate import Accelerator
from .batches import BatchParts, batch_parts, is_sharded
from .saved_state import load_optimizers, load_weights, save_optimizers, whole_weights

PRIVATE = (
    "_load_best_model",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_save",
    "_save_optimizer_and_scheduler",
)
"""What is overridden here without being public in transformers: nothing else decides what a checkpoint holds."""

missing: list[str] = [name for name in PRIVATE if not hasattr(transformers.Trainer, name)]
if missing:
    raise ImportError(
        f"the Trainer of transformers {transformers.__version__} has no {', '.join(missing)}, without which sharded "
        "models would be saved in part; install a transformers that this release of dtensor knows, such as 5.24"
    )


class Trainer(transformers.Trainer):
    """`transformers.Trainer` for a model that `distribute_model`, `parallelize_module` or `fully_shard` has sharded.

    All ranks call `train`, `evaluate`, `predict` and `save_model`. A checkpoint holds the weights as any other program
    reads them, and the optimizer in a folder that any number of ranks reads. Models that are not sharded are trained as
    by transformers.

    Put it before another trainer that derives from transformers':

    >>> class SFT(Trainer, trl.SFTTrainer):
    ...     pass
    """

    def create_accelerator_and_postprocess(self) -> None:
        """Makes the accelerator one for the sharded model.

        Raises:
            ValueError: the model computes one loss from several parts of a batch, but the arguments say that tokens are
                not averaged across devices.
            MeshError, PlacementError: as `batch_parts`.
        """
        super().create_accelerator_and_postprocess()
        if self._sharded is None:
            return
        Accelerator.of(self.accelerator, self._sharded)
        if batch_parts(self._sharded).shared > 1 and not self.args.average_tokens_across_devices:
            raise ArgumentError(
                "the model's loss is that of all ranks' parts of the batch, so its tokens are counted on all of them; "
                "write TrainingArguments(average_tokens_across_devices=True)"
            )

    @property
    def _sharded(self) -> nn.Module | None:
        """The model, if it is sharded."""
        model: Any = self.model
        return model if is_sharded(model) else None

    def get_total_train_batch_size(self, args: Any) -> int:
        """The number of samples of an optimizer step: ranks that read the same batch count once."""
        total = super().get_total_train_batch_size(args)
        return total if self._sharded is None else total * self.accelerator.num_processes // args.world_size

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None, **kwargs: Any
    ) -> Any:
        """The loss, of which the mean over the ranks of the data axes is that of one device.

        Raises:
            TypeError: the loss is a DTensor.
        """
        with contextlib.ExitStack() as stack:
            if self._sharded is not None:
                parts = batch_parts(self._sharded)
                stack.enter_context(_plain_heads(self._sharded, parts))
                stack.enter_context(_items_of_all_parts(model, parts))
            result = super().compute_loss(
                model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch, **kwargs
            )
        loss = result[0] if return_outputs else result
        if isinstance(loss, DTensor):
            raise ArgumentTypeError(
                "the loss is a DTensor, and Trainer adds it to a plain tensor; let the model return plain tensors, or "
                "write loss.full_tensor() in compute_loss"
            )
        return result

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        model: Any = self._sharded
        if model is not None and state_dict is None and not is_taught(model):
            state_dict = whole_weights(model)
        super()._save(output_dir, state_dict)
        if model is not None and state_dict is None and not self.args.should_save:
            # The call above has done nothing, while the first rank asks for tensors.
            model.save_pretrained(output_dir or self.args.output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not self._load_weights(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        if not self._load_weights(self.state.best_model_checkpoint):
            super()._load_best_model()

    def _load_weights(self, folder: str | None) -> bool:
        """Whether the model is sharded and its weights were read from `folder`, which has them as safetensors files."""
        if folder is None or self._sharded is None or not any(Path(folder).glob("model*.safetensors")):
            return False
        load_weights(self._sharded, Path(folder))
        return True

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self._sharded is not None:
            save_optimizers(self._sharded, [self._inner_optimizer], Path(output_dir))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and self._sharded is not None:
            load_optimizers(self._sharded, [self._inner_optimizer], Path(checkpoint))

    @property
    def _inner_optimizer(self) -> torch.optim.Optimizer:
        optimizer: Any = self.optimizer
        return getattr(optimizer, "optimizer", optimizer)


@contextlib.contextmanager
def _items_of_all_parts(model: nn.Module, parts: BatchParts) -> Iterator[None]:
    """A trainer multiplies losses by the number of parts, for ranks that each have a loss of their own. So a model
    whose loss is already that of several parts is given as many times the number of items to divide by."""

    def multiplied(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        items = kwargs.get("num_items_in_batch")
        return args, kwargs if items is None else {**kwargs, "num_items_in_batch": items * parts.shared}

    if parts.shared == 1:
        yield
        return
    handle = model.register_forward_pre_hook(multiplied, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def _plain_heads(model: nn.Module, parts: BatchParts) -> Iterator[None]:
    """Gives the weights of a head as whole plain tensors to a forward that was put on a model after it was sharded, as
    TRL does: it runs on what the sharded modules inside return, and asks for the head by `get_output_embeddings`."""
    given = [m for m in model.modules() if "forward" in vars(m) and hasattr(m, "get_output_embeddings")]
    for module in given:
        vars(module)["get_output_embeddings"] = functools.partial(_plain_head, type(module), module, parts)
    try:
        yield
    finally:
        for module in given:
            del vars(module)["get_output_embeddings"]


def _plain_head(cls: Any, module: nn.Module, parts: BatchParts) -> Any:
    head = cls.get_output_embeddings(module)
    return SimpleNamespace(weight=parts.whole(head.weight), bias=parts.whole(getattr(head, "bias", None)))


__all__ = ["Trainer"]
