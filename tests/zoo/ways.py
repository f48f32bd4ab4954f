"""What is done to a model of the zoo: each way takes the plain model and gives the sharded one. All ranks have the same
batch, so that a mean over them is one device's."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.tensor import parallel as torch_parallel
from torch.nn.parallel import DistributedDataParallel

from dtensor import DTensor, Replicate, distribute_model, distribute_tensor, init_device_mesh, prepare, search
from dtensor.interop import convert_module
from dtensor.parallel import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module
from dtensor.prices.links import Link
from dtensor.prices.machine import MACHINES

from .models import EXAMPLES

Given = dict[str, Any]

FAST = Link(alpha=1e-9, bandwidth=1e14, memory=1e14, launch=1e-9, start=1e-9)
"""Over it models as small as those of the zoo share nearly all of their work; else they gather and compute alike."""


def tensor_parallel(
    model: nn.Module, name: str, given: Given, links: Sequence[Link] | None = None, ranks: int = 2
) -> tuple[nn.Module, Given]:
    """By `distribute_model`; with links also for a batch, so that eager mode follows what is decided."""
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    prepare(mesh, links=links)
    cut = _cut(name, given, mesh)
    distribute_model(model, mesh, EXAMPLES[name].plan, outputs={}, batch=cut if links else None)
    assert any(isinstance(p, DTensor) and p.placements != (Replicate(),) for p in model.parameters())
    return model, cut


def two_dimensional(
    model: nn.Module, name: str, given: Given, links: Sequence[Link] | None = None
) -> tuple[nn.Module, Given]:
    """The same, beside `fully_shard`."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    prepare(mesh, links=links)
    distribute_model(model, mesh["tp"], EXAMPLES[name].plan, outputs={})
    return _by_layers(fully_shard, model, mesh["dp"]), _cut(name, given, mesh["tp"])


def fully_sharded(model: nn.Module, name: str, given: Given) -> tuple[nn.Module, Given]:
    """By `fully_shard` alone."""
    return _by_layers(fully_shard, model, _data_mesh()), given


def found(model: nn.Module, name: str, given: Given) -> tuple[nn.Module, Given]:
    """By a plan that is searched, on processors and over links on which it pays to share the work."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    machine = replace(MACHINES["cpu"], launch=0.0)
    plan = search(model, mesh, given, links={"tp": FAST}, machine=machine)
    assert plan.parameters or plan.inputs
    return distribute_model(model, mesh, plan, outputs={}), plan.part(given, mesh)


def in_styles(model: nn.Module, name: str, given: Given) -> tuple[nn.Module, Given]:
    """By `parallelize_module`."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    return parallelize_module(model, mesh, _styles(ColwiseParallel, RowwiseParallel)), given


def in_torch_styles(model: nn.Module, name: str, given: Given) -> tuple[nn.Module, Given]:
    """By torch's `parallelize_module`."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan = _styles(torch_parallel.ColwiseParallel, torch_parallel.RowwiseParallel)
    return torch_parallel.parallelize_module(model, mesh, plan), given


def in_torch_fsdp2(model: nn.Module, name: str, given: Given) -> tuple[nn.Module, Given]:
    """By torch's `fully_shard`."""
    return _by_layers(torch_fsdp.fully_shard, model, _data_mesh()), given


def in_torch_ddp(model: nn.Module, name: str, given: Given) -> tuple[nn.Module, Given]:
    return DistributedDataParallel(model), given


def converted(way: Callable[..., Any]) -> Callable[..., Any]:
    """As torch does it, and then ours."""

    def made(model: nn.Module, name: str, given: Given) -> tuple[nn.Module, Given]:
        model, given = way(model, name, given)
        return convert_module(model), given

    return made


def _data_mesh() -> Any:
    return init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))


def _cut(name: str, given: Given, mesh: Any) -> Given:
    cut = EXAMPLES[name].cut
    return {k: distribute_tensor(x, mesh, [cut[k]]) if k in cut else x for k, x in given.items()}


def _by_layers(shard: Callable[..., Any], model: nn.Module, mesh: Any) -> nn.Module:
    for part in model.modules():
        if isinstance(part, nn.ModuleList):
            for layer in part:
                shard(layer, mesh=mesh)
    shard(model, mesh=mesh)
    return model


def _styles(columns: Any, rows: Any) -> dict[str, Any]:
    """Of a decoder of transformers."""
    first = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    second = ("self_attn.o_proj", "mlp.down_proj")
    plan = {f"model.layers.*.{name}": columns() for name in first}
    return plan | {f"model.layers.*.{name}": rows() for name in second}


ALL, SOME, DECODERS = tuple(EXAMPLES), ("llama", "vit", "convolutions"), ("llama", "mistral")

WAYS: dict[str, tuple[int, Callable[..., Any], tuple[str, ...]]] = {
    "tp": (2, tensor_parallel, ALL),
    "tp, fast": (2, partial(tensor_parallel, links=[FAST]), ALL),
    "tp of four, fast": (4, partial(tensor_parallel, links=[FAST], ranks=4), ALL),
    "found": (2, found, ALL),
    "fsdp": (2, fully_sharded, ALL),
    "2d": (4, two_dimensional, ALL),
    "2d, fast": (4, partial(two_dimensional, links=[FAST, FAST]), ALL),
    "styles": (2, in_styles, DECODERS),
    "torch tp": (2, in_torch_styles, DECODERS),
    "torch fsdp2": (2, in_torch_fsdp2, SOME),
    "torch ddp": (2, in_torch_ddp, SOME),
    "torch tp, converted": (2, converted(in_torch_styles), DECODERS),
    "torch fsdp2, converted": (2, converted(in_torch_fsdp2), SOME),
}
"""Way -> number of ranks, what is done to the model and its inputs, and the models that it is tried on."""

HOW: dict[str, dict[str, Any] | None] = {
    "eager": None,
    "compiled": {"options": {"inner": "aot_eager"}},
    "one by one": {"options": {"inner": "aot_eager", "decide": False}},
    "dynamic": {"options": {"inner": "aot_eager"}, "dynamic": True},
    "inductor": {},
}
"""How a model runs: the arguments of torch.compile beside the backend. One by one, each operator chooses for itself.
Dynamic, batches of other sizes follow the first."""

THIRD = ALL[::3]
"""The models that are compiled by Inductor, too."""


def cases() -> list[tuple[str, str, str]]:
    """Name, way and how, of all that is tried."""
    found = [(name, way, how) for name in EXAMPLES for way in WAYS if name in WAYS[way][2] for how in HOW]
    return [case for case in found if _is_of_interest(*case)]


def _is_of_interest(name: str, way: str, how: str) -> bool:
    if way in ("2d, fast", "tp of four, fast"):
        return how == "compiled"
    if how == "dynamic":  # the edges of the graph name its nodes
        return way == "tp, fast" and name != "graph"
    return how in ("eager", "compiled") or (way == "tp" and (how != "inductor" or name in THIRD))


__all__ = ["HOW", "THIRD", "WAYS", "cases"]
