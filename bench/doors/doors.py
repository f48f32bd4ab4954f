"""The doors: ways in which a user has a model sharded that was written for one device. `opened` goes through one.

On a mesh with an axis "dp" ranks along it have their own parts of the batch, and parameters are fully sharded over it
by the same library, but where a plan is searched, which chooses for both axes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh as their_mesh
from torch.distributed.fsdp import fully_shard as their_fully_shard
from torch.distributed.tensor import DTensor as TheirDTensor
from torch.distributed.tensor import parallel as their_parallel

from dtensor import DTensor, Shard, distribute_model, search
from dtensor import parallel as our_parallel

from .subjects import SUBJECTS, Subject

DATA, TENSOR = "dp", "tp"
TRAINING: Literal["training"] = "training"
FORWARD: Literal["forward"] = "forward"
Mode = Literal["training", "forward"]
Batch = dict[str, torch.Tensor]

STYLES, SEQUENCE, PLACEMENTS, OWN_PLAN, AUTO = "styles", "sequence", "placements", "model", "auto"
TORCH_TP, TORCH_FSDP = "torch tp", "torch fsdp2"
BY_HAND = (STYLES, SEQUENCE)
"""Doors through which a user says where activations are."""
OURS = (STYLES, SEQUENCE, PLACEMENTS, OWN_PLAN, AUTO)
WORDS = {
    STYLES: "parallelize_module by hand",
    SEQUENCE: "parallelize_module by hand, activations cut along the sequence between blocks",
    PLACEMENTS: "distribute_model, which cuts the same parameters in the same way",
    OWN_PLAN: 'distribute_model(..., "model"): the plan of transformers',
    AUTO: 'distribute_model(..., "auto"): a plan that is searched',
    TORCH_TP: "the same styles as by hand, of torch",
    TORCH_FSDP: "FSDP2 over all ranks",
}
"""Door -> what it is; all doors, in order."""


class Missing(Exception):
    """A door that a model does not have."""


@dataclass
class Opened:
    """A sharded model, and its optimizer.

    Attributes:
        model: the model.
        run: what is called for its forward: the model, compiled or not.
        batch: the arguments of the forward on this rank.
        mode: "training" for forward, backward and update, "forward" for a forward without gradients.
    """

    model: nn.Module
    run: Callable[..., Any]
    batch: Batch
    mode: Mode

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01) if self.mode == TRAINING else None

    def forward(self) -> Any:
        """Return the loss, or without gradients the logits."""
        if self.mode == TRAINING:
            return self.run(**self.batch)["loss"]
        with torch.no_grad():
            return self.run(**self.batch)["logits"]

    def update(self) -> None:
        assert self.optimizer is not None
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> float:
        """Take a step and return the loss before it; 0 without gradients."""
        out = self.forward()
        if self.mode == FORWARD:
            return 0.0
        out.backward()
        self.update()
        return out.item()


def opened(door: str, name: str, mesh: Any, mode: Mode, wrap: Callable[[Any], Any]) -> Opened:
    """Shard the subject `name` over `mesh`.

    Args:
        door: a key of `WORDS`.
        name: a key of `SUBJECTS`.
        mesh: a mesh of the axis "tp", or of "dp" and "tp".
        mode: "training" or "forward".
        wrap: compiles the model.

    Raises:
        Missing: the model has no such door; the message states why.
    """
    subject = SUBJECTS[name]
    model, batch = subject.model(), subject.batch()
    if mode == FORWARD:
        del batch["labels"]
        if name == "t5":
            batch["decoder_input_ids"] = batch["input_ids"]
    if door == AUTO:
        plan = search(model, mesh, batch, mode=mode, optimizer_states=0)
        part = plan.part(batch, mesh, model)
        return Opened(model, wrap(distribute_model(model, mesh, plan, outputs={})), part, mode)
    if door == TORCH_FSDP:
        whole = their_mesh("cpu", (mesh.size(),), mesh_dim_names=(DATA,))
        _fully_sharded(their_fully_shard, subject, model, whole)
        return Opened(model, wrap(model), _part(batch, whole), mode)
    tensor = mesh[TENSOR] if mesh.ndim > 1 else mesh
    if door in (PLACEMENTS, OWN_PLAN):
        if door == OWN_PLAN and not getattr(model, "tp_plan", None):
            raise Missing("transformers has no plan for it")
        given: Any = {pattern: {TENSOR: Shard(dim)} for pattern, dim in subject.parameters.items()}
        distribute_model(model, tensor, given if door == PLACEMENTS else "model", outputs={})
    else:
        lib, cls = (their_parallel, TheirDTensor) if door == TORCH_TP else (our_parallel, DTensor)
        subject.adapted(model, tensor, cls)
        lib.parallelize_module(model, tensor, (subject.sequence if door == SEQUENCE else subject.styles)(lib))
    if mesh.ndim > 1:
        shard = their_fully_shard if door == TORCH_TP else our_parallel.fully_shard
        _fully_sharded(shard, subject, model, mesh[DATA])
        batch = _part(batch, mesh[DATA])
    return Opened(model, wrap(model), batch, mode)


def _fully_sharded(shard: Callable[..., Any], subject: Subject, model: nn.Module, mesh: Any) -> None:
    for name in subject.layers:
        for layer in model.get_submodule(name).children():
            shard(layer, mesh=mesh)
    shard(model, mesh=mesh)


def _part(batch: Batch, mesh: Any) -> Batch:
    return {name: x.chunk(mesh.size())[mesh.get_local_rank()].clone() for name, x in batch.items()}


__all__ = [
    "BY_HAND",
    "DATA",
    "FORWARD",
    "OURS",
    "STYLES",
    "TENSOR",
    "TRAINING",
    "WORDS",
    "Missing",
    "Mode",
    "Opened",
    "opened",
]
