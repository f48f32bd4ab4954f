"""A model of the zoo over several ranks, in one of several ways, against itself on one device: loss, output, every
gradient, and steps of AdamW."""

import copy
from collections import Counter
from typing import Any, NamedTuple

import torch

from dtensor import Replicate, distribute_model, fallbacks, init_device_mesh
from dtensor.compile import statistics
from dtensor.parallel import fully_shard

from .models import EXAMPLES

STEPS = 5


class Found(NamedTuple):
    """What a comparison saw: collectives of the last graphs, and what else is counted in compiled code alone."""

    collectives: Counter[str]
    graphs: int
    breaks: int
    fallbacks: Counter[str]


def made(name: str) -> torch.nn.Module:
    import transformers

    torch.manual_seed(0)
    return EXAMPLES[name].model(transformers)


def results(out: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return out["loss"], out["logits_per_image" if "logits_per_image" in out else "logits"]


def tensor_parallel(model: torch.nn.Module, name: str) -> torch.nn.Module:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    distribute_model(model, mesh, EXAMPLES[name].plan, outputs={})
    assert any(p.placements != (Replicate(),) for p in model.parameters())
    return model


def two_dimensional(model: torch.nn.Module, name: str) -> torch.nn.Module:
    """Beside full sharding; all ranks have the same batch, so that the mean over it is one device's."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    distribute_model(model, mesh["tp"], EXAMPLES[name].plan, outputs={})
    return _by_layers(model, mesh["dp"])


def fully_sharded(model: torch.nn.Module, name: str) -> torch.nn.Module:
    """By `fully_shard` alone, likewise."""
    return _by_layers(model, init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))


def _by_layers(model: torch.nn.Module, mesh: Any) -> torch.nn.Module:
    for part in model.modules():
        if isinstance(part, torch.nn.ModuleList):
            for layer in part:
                fully_shard(layer, mesh)
    return fully_shard(model, mesh)


WAYS = {"tp": (2, tensor_parallel), "fsdp": (2, fully_sharded), "2d": (4, two_dimensional)}
"""Way -> number of ranks, and what is done to the model."""


def compare(name: str, way: str, compiled: bool) -> Found:
    """Raises AssertionError where something differs; on each rank."""
    plain, given = made(name), EXAMPLES[name].inputs()
    model = WAYS[way][1](copy.deepcopy(plain), name)
    run = torch.compile(model, backend="dtensor", options={"inner": "aot_eager"}) if compiled else model
    before = fallbacks()
    with statistics() as seen:
        _compare_once(plain, model, run, given)
    dense, ours = (torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (plain, model))
    for step in range(STEPS):
        dense.step(), ours.step()
        dense.zero_grad(), ours.zero_grad()
        want, found = results(plain(**given))[0], results(run(**given))[0]
        torch.testing.assert_close(found, want, msg=f"loss after {step + 1} steps: {{}}".format)
        want.backward(), found.backward()
    collectives = Counter(c.op for r in seen.records if r.direction != "joint" for c in r.collectives)
    return Found(collectives, seen.graphs, seen.graph_breaks, fallbacks() - before)


def _compare_once(plain: torch.nn.Module, model: torch.nn.Module, run: Any, given: dict[str, Any]) -> None:
    want, found = results(plain(**given)), results(run(**given))
    torch.testing.assert_close(found, want)
    want[0].backward()
    found[0].backward()
    expected = dict(plain.named_parameters())
    for name, p in model.named_parameters():
        if expected[name].grad is None:
            assert p.grad is None, name
            continue
        torch.testing.assert_close(p.grad.full_tensor(), expected[name].grad, msg=f"{name}: {{}}".format)
        assert p.grad.placements == p.placements


def tried(rank: int, name: str, way: str, compiled: bool) -> Found | str:
    """What a comparison saw on a rank, or why it did not get through."""
    torch.compiler.reset()
    try:
        return compare(name, way, compiled)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"


__all__ = ["WAYS", "Found", "compare", "made", "tried"]
