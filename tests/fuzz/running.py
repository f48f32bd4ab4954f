"""A program on ranks, compared with one device.

check(rank, program, setting) -> how many graphs it ran, if all is well; it raises what is not
communicated(program, setting, rank) -> what its graphs would send, without other ranks
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dtensor import DTensor, Shard, init_device_mesh
from dtensor.compile.backends.compare_ranks import Collectives, overheard
from dtensor.job.groups import calls_on
from dtensor.mesh.caches import clear_caches
from dtensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, fully_shard, parallelize_module
from dtensor.parallel.modules.distribute_module import distribute_module, distribute_parameter
from dtensor.testing import fake_ranks

from .program import (
    Program,
    Result,
    collect,
    differentiated,
    distributed,
    function_of,
    plain_inputs,
    plain_modules,
    reference,
    total,
)

TOLERANCE = {"float64": 1e-7, "float32": 2e-3}
"""Of a difference, relative to one and the largest absolute value; that of the coarsest input holds for all."""


@dataclass(frozen=True)
class Setting:
    """How a program runs.

    Attributes:
        mesh: shape of the mesh.
        compiled: whether by torch.compile with the backend.
        dynamic: as torch.compile takes it.
        options: of the backend, as pairs.
        twice: a second derivative.
        batches: lengths of the batch in later calls of what was compiled.
    """

    mesh: tuple[int, ...]
    compiled: bool = False
    dynamic: bool | None = False
    options: tuple[tuple[str, Any], ...] = ()
    twice: bool = False
    batches: tuple[int, ...] = ()

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        n = 1
        for k in self.mesh:
            n *= k
        return n


class Wrong(AssertionError):
    """A tensor differs from one device's."""


def by_style(module: nn.Module, mesh: Any) -> nn.Module:
    """Tensor parallelism as users write it; what leaves a layer stays a DTensor."""
    col, row = ColwiseParallel(use_local_output=False), RowwiseParallel(use_local_output=False)
    if isinstance(module, (nn.Linear, nn.Embedding)):
        return parallelize_module(module, mesh, col)
    if isinstance(module, nn.LayerNorm):
        return parallelize_module(module, mesh, SequenceParallel())
    plan = {"norm": SequenceParallel(), "q": col, "k": col, "v": col, "o": row, "up": col, "down": row}
    names = dict(module.named_children())
    return parallelize_module(module, mesh, {k: v for k, v in plan.items() if k in names})


def in_shards(module: nn.Module, mesh: Any) -> nn.Module:
    """Every parameter sharded, each axis on another dimension."""

    def partition(name: str, part: nn.Module, mesh: Any) -> None:
        for key, p in list(part.named_parameters(recurse=False)):
            placements = [Shard((axis + len(key)) % p.dim()) for axis in range(mesh.ndim)]
            part.register_parameter(key, distribute_parameter(p, mesh, placements))

    return distribute_module(module, mesh, partition)


PLANS: dict[str, Callable[[nn.Module, Any], nn.Module]] = {
    "replicate": distribute_module,
    "shard": in_shards,
    "fsdp": lambda module, mesh: fully_shard(module, mesh, activations="global"),
    "tp": by_style,
}
"""`Module.plan` -> what applies it."""


def given_on(program: Program, mesh: Any, batch: int | None = None) -> tuple[list[torch.Tensor], list[nn.Module]]:
    """Inputs and modules as the program is given them on a mesh."""
    inputs = [distributed(x, mesh, g.placements) for x, g in zip(plain_inputs(program, batch), program.inputs)]
    return inputs, [PLANS[g.plan](m, mesh) for m, g in zip(plain_modules(program), program.modules)]


def on_ranks(program: Program, setting: Setting, mesh: Any, fn: Callable, batch: int | None = None) -> Result:
    """What the program gives on this rank, as whole tensors."""
    inputs, modules = given_on(program, mesh, batch)
    outputs = fn(*inputs, *modules)
    leaves = [x for x in inputs if x.requires_grad] + [p for m in modules for p in m.parameters()]
    differentiated(total(outputs), leaves, setting.twice)
    return collect(program, inputs, modules, outputs, whole)


def whole(x: torch.Tensor) -> torch.Tensor:
    """The plain tensor; a DTensor is gathered."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def compare(found: Result, expected: Result, tolerance: float, what: str = "") -> None:
    """Raise unless they are alike.

    Raises:
        Wrong: a tensor is not one device's.
    """
    for name, want in expected.tensors.items():
        got = found.tensors[name]
        if got is None or want is None:
            there = got if want is None else want
            if there is not None and there.any():  # zeros and None mean the same
                raise Wrong(f"{what}{name} is {'None' if got is None else 'a tensor'}, one device's is not so")
            continue
        if (got.shape, got.dtype) != (want.shape, want.dtype):
            raise Wrong(f"{what}{name} is {got.dtype}{list(got.shape)}, one device's {want.dtype}{list(want.shape)}")
        error = difference(got, want, tolerance)
        if error:
            raise Wrong(f"{what}{name} {error}")


def difference(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> str:
    """In words how `got` differs; nothing if it is within the tolerance."""
    if not want.is_floating_point():
        return "" if torch.equal(got, want) else f"is {got.tolist()}, one device's {want.tolist()}"
    tolerance = max(tolerance, TOLERANCE[str(want.dtype).removeprefix("torch.")])
    finite = want[want.isfinite()]
    bound = tolerance * (1 + (finite.abs().max().item() if finite.numel() else 0.0))
    if torch.allclose(got, want, rtol=0, atol=bound, equal_nan=True):
        return ""
    return f"is off by {(got - want).abs().max().item():.3g} of {want.abs().max().item():.3g}"


def compiled(program: Program, setting: Setting) -> Callable:
    """The program as the setting compiles it."""
    return torch.compile(
        function_of(program.source),
        backend="dtensor",
        fullgraph=True,
        dynamic=setting.dynamic,
        options=dict(setting.options),
    )


def communicated(program: Program, setting: Setting, rank: int) -> list[Collectives]:
    """What each graph of the program communicates on this rank, which alone exists."""
    torch.compiler.reset()
    clear_caches()
    with fake_ranks(setting.ranks, rank), overheard() as heard:
        mesh = init_device_mesh("cpu", setting.mesh)
        fn = compiled(program, setting)
        for batch in (None, *setting.batches):
            inputs, modules = given_on(program, mesh, batch)
            outputs = fn(*inputs, *modules)
            leaves = [x for x in inputs if x.requires_grad] + [p for m in modules for p in m.parameters()]
            differentiated(total(outputs), leaves, setting.twice)
    torch.compiler.reset()
    return heard


def check(rank: int, program: Program, setting: Setting) -> dict[str, int]:
    """Run the program on this rank and compare it with one device.

    Returns:
        group -> how many compiled graphs this rank has run on it.

    Raises:
        Wrong: a result differs; and whatever the program raises.
    """
    mesh = init_device_mesh("cpu", setting.mesh)
    if setting.compiled:
        torch.compiler.reset()
    fn = compiled(program, setting) if setting.compiled else function_of(program.source)
    tolerance = max(TOLERANCE.get(x.dtype, 0.0) for x in program.inputs)
    for batch in (None, *setting.batches):
        expected = reference(program, twice=setting.twice, batch=batch)
        found = on_ranks(program, setting, mesh, fn, batch)
        compare(found, expected, tolerance, "" if batch is None else f"with a batch of {batch}: ")
    return {group.group_name: calls_on(group).count for group in mesh.get_all_groups()} if setting.compiled else {}
