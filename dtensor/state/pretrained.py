"""Folders of pretrained models, as transformers and peft write and read them, of models that are sharded.

Both directions run the code of these libraries, with `Deferred` tensors in place of values. `save_pretrained` runs on
rank 0 alone: it writes the configuration, chooses names and files, and hands the tensors of each file over. Only then
are they brought together, one at a time, by all ranks: the others wait for the name of the next one. `from_pretrained`
makes a model of tensors that are not read yet; when it is sharded, each rank reads its parts.
"""

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..errors import ArgumentTypeError, CheckpointError
from ..layout.placements import Partial
from ..tensor.deferred import Box, deferred, read
from ..tensor.tensor import DTensor
from .files import line
from .safetensors import entries_of, later, whole, write


def saving(save: Callable[..., Any]) -> Callable[..., Any]:
    """The method `save_pretrained` of a sharded model, made of that of its class."""

    @functools.wraps(save)
    def save_pretrained(self: nn.Module, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(save).bind(self, save_directory, *args, **kwargs)
        named: dict[str, Any] = bound.arguments
        if named.get("distributed_checkpoint"):
            raise CheckpointError(
                "distributed_checkpoint=True has transformers write the shards of its own kinds of sharding; write "
                "dtensor.Checkpoints(folder).save(...) to go on later, or leave it out for a folder to load anywhere"
            )
        named = named if "state_dict" in inspect.signature(save).parameters else named.setdefault("kwargs", {})
        state = named.get("state_dict")
        state = self.state_dict() if state is None else state
        if not any(isinstance(x, DTensor) for x in state.values()):
            return save(self, save_directory, *args, **kwargs)
        _meet(state)
        if dist.get_rank() != 0:
            return _bring_together(state)
        later, done = _asked_for(state)
        named["state_dict"] = later
        with done, _written_by_us(type(self)):
            return save(*bound.args, **bound.kwargs)

    return save_pretrained


def _meet(state: dict[str, Any]) -> None:
    """Wait for the other ranks, in a collective of this library, which ends if they do not come."""
    mesh = next(x.device_mesh for x in state.values() if isinstance(x, DTensor))
    here = torch.zeros(1, device=mesh.device_type)
    DTensor.from_local(here, mesh, [Partial()] * mesh.ndim).full_tensor()


def _asked_for(state: dict[str, Any]) -> tuple[dict[str, Any], AbstractContextManager[None]]:
    """On rank 0: a state dict whose DTensors are brought together when they are read, and the context to do so in."""
    kept: list[tuple[str, torch.Tensor]] = []

    def brought(name: str, box: Box) -> torch.Tensor:
        if not kept or kept[0][0] != name:  # all experts of a layer are made of one tensor
            kept.clear()
            _tell((name, None))
            kept.append((name, whole(state[name]).cpu()))
        return read(kept[0][1], box)

    @contextmanager
    def asking() -> Iterator[None]:
        wrong: str | None = "it was interrupted"
        try:
            yield
            wrong = None
        except Exception as error:
            wrong = line(error)
            raise
        finally:
            _tell((None, wrong))

    def later(name: str, x: Any) -> Any:
        return deferred(x, functools.partial(brought, name)) if isinstance(x, DTensor) else x

    return {name: later(name, x) for name, x in state.items()}, asking()


def _bring_together(state: dict[str, Any]) -> None:
    """What the other ranks do while rank 0 writes."""
    while True:
        name, wrong = _tell(None)
        if wrong is not None:
            raise CheckpointError(f"save_pretrained failed on rank 0: {wrong}")
        if name is None:
            return
        whole(state[name])


def _tell(what: Any) -> Any:
    """What rank 0 tells all ranks: the name of the tensor to bring together, or None, and what went wrong."""
    told = [what]
    dist.broadcast_object_list(told, src=0)
    return told[0]


@contextmanager
def _written_by_us(model_class: type[nn.Module]) -> Iterator[None]:
    """Context in which the methods `save_pretrained` of a class write safetensors files one tensor after the other."""

    def save_file(tensors: dict[str, torch.Tensor], filename: Any, metadata: dict[str, str] | None = None) -> None:
        write(tensors, filename, metadata, read)

    saves = [vars(cls)["save_pretrained"] for cls in model_class.__mro__ if "save_pretrained" in vars(cls)]
    with ExitStack() as stack:
        for save in saves:
            stack.enter_context(_in_place_of("save_file", save_file, inspect.unwrap(save).__globals__))
        yield


@contextmanager
def _in_place_of(name: str, ours: Any, names: dict[str, Any]) -> Iterator[None]:
    """Context in which a module, whose globals are `names`, has `ours` where it imported `name` of safetensors."""
    library = sys.modules.get("safetensors.torch")
    theirs = {key: x for key, x in names.items() if x is getattr(library, name, names)}
    names.update(dict.fromkeys(theirs, ours))
    try:
        yield
    finally:
        names.update(theirs)


def from_pretrained(model_class: Any, path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> nn.Module:
    """`model_class.from_pretrained(path, ...)` of transformers, for a model that is then sharded.

    No weights are read: `distribute_model`, `fully_shard` or `parallelize_module` reads of each parameter the part that
    this rank holds, and parameters that they leave plain. Every rank needs the files. Buffers, tied weights, dtypes,
    names and stacked experts are what transformers makes of them.

    Args:
        model_class: a class of transformers, such as `AutoModelForCausalLM`.
        path: a folder, or the name of a model on the hub, with safetensors files.
        *args: further arguments of `model_class.from_pretrained`.
        **kwargs: further arguments of `model_class.from_pretrained`, such as `dtype`.

    Returns:
        The model. Its weights are on the meta device until it is sharded.

    Raises:
        TypeError: `model_class` has no `from_pretrained`, or transformers is not the library that has it.

    >>> model = dtensor.from_pretrained(AutoModelForCausalLM, "folder")
    >>> distribute_model(model, mesh, "model", outputs={})
    """
    modeling = _modeling(model_class)
    with _in_place_of("safe_open", functools.partial(_Opened, modeling.safe_open), vars(modeling)):
        return model_class.from_pretrained(path, *args, **kwargs)


def _modeling(model_class: Any) -> Any:
    if not callable(getattr(model_class, "from_pretrained", None)) or "transformers" not in sys.modules:
        raise ArgumentTypeError(
            f"from_pretrained takes a class of transformers, such as AutoModelForCausalLM; got {model_class!r}"
        )
    return importlib.import_module("transformers.modeling_utils")


class _Opened:
    """An open safetensors file, as `safetensors.safe_open` gives one, whose tensors are read later.

    What else is asked of it is asked of the library, which then maps the file.
    """

    def __init__(self, safe_open: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        self.file, self.entries = Path(file), entries_of(Path(file))
        self.open = functools.partial(safe_open, file, *args, **kwargs)

    def keys(self) -> list[str]:
        return list(self.entries)

    def get_tensor(self, name: str) -> torch.Tensor:
        return later(name, self.file, self.entries[name])

    def get_slice(self, name: str) -> "_Slice":
        return _Slice(self.get_tensor(name), self.entries[name])

    def __getattr__(self, name: str) -> Any:
        with self.open() as opened:
            return getattr(opened, name)

    def __enter__(self) -> "_Opened":
        return self

    def __exit__(self, *error: Any) -> None:
        pass


class _Slice:
    """What `get_slice` of an open safetensors file returns."""

    def __init__(self, x: torch.Tensor, entry: dict[str, Any]) -> None:
        self.x, self.entry = x, entry

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.x[index]

    def get_shape(self) -> list[int]:
        return self.entry["shape"]

    def get_dtype(self) -> str:
        return self.entry["dtype"]


__all__ = ["from_pretrained", "saving"]
