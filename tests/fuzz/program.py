"""Programs: source text over named values, and the tensors it begins with.

The text is one function. It runs as it stands on plain tensors, where redistributions do nothing, and on DTensors,
eager or compiled, so that a program that fails is printed as it was run (`script`). It may name what is in `NAMES`.

    Recipe (numbers) -> `building.build` -> Program -> `reference` on one device, `outcome` on a rank
"""

import linecache
import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor


@dataclass(frozen=True)
class Input:
    """A tensor that the program is given.

    Attributes:
        name: what the text calls it.
        shape: its global shape.
        dtype: "float64", "float32" or "int64".
        placements: one for each mesh axis: "R", "P" or "S0", "S1", …
        high: integers are below this.
        grad: whether it is a leaf that takes a gradient.
        batch: its dimension that is the batch, of another length in a second call; None for none.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    placements: tuple[str, ...]
    high: int = 0
    grad: bool = True
    batch: int | None = None


@dataclass(frozen=True)
class Module:
    """A module that the program calls: the text that makes it, and how it is parallelized, a key of `PLANS`."""

    name: str
    text: str
    plan: str


@dataclass(frozen=True)
class Program:
    """A function as text, and what it takes.

    Attributes:
        inputs, modules: its arguments.
        lines: assignments and writes.
        outputs: names it returns, those that need a gradient first.
        checkpointed: (start, stop, arguments, results): these lines run in a checkpointed function.
    """

    inputs: tuple[Input, ...]
    modules: tuple[Module, ...]
    lines: tuple[str, ...]
    outputs: tuple[str, ...]
    checkpointed: tuple[int, int, tuple[str, ...], tuple[str, ...]] | None = None

    @property
    def source(self) -> str:
        """The function `program`, which returns a tuple."""
        lines = list(self.lines)
        if self.checkpointed:
            start, stop, takes, gives = self.checkpointed
            inner = [f"def part({', '.join(takes)}):", *(f"    {x}" for x in lines[start:stop])]
            inner += [f"    return {', '.join(gives)},"]
            call = f"{', '.join(gives)}, = checkpoint(part, {', '.join(takes)}, use_reentrant=False)"
            lines[start:stop] = [*inner, call]
        names = ", ".join(x.name for x in (*self.inputs, *self.modules))
        returned = "".join(f"{name}, " for name in self.outputs)
        return "\n".join([f"def program({names}):", *(f"    {x}" for x in lines), f"    return ({returned})", ""])


def move(x, *placements):
    """`x` in these placements, if it is a DTensor; the rank of the mesh says how many of them count."""
    return x.redistribute(placements=placements[: x.device_mesh.ndim]) if isinstance(x, DTensor) else x


def through_whole(x):
    """`x` by way of the whole plain tensor."""
    return DTensor.from_local(x.full_tensor(), x.device_mesh) if isinstance(x, DTensor) else x


def through_local(x):
    """`x` by way of each rank's part."""
    if not isinstance(x, DTensor):
        return x
    return DTensor.from_local(x.to_local(), x.device_mesh, x.placements, shape=x.shape, stride=x.stride())


class Block(nn.Module):
    """Attention without bias and a perceptron, each after a norm; (batch, sequence, width) with any number of heads."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        y = self.norm(x)
        q, k, v = (
            f(y).unflatten(-1, (-1, x.shape[-1] // self.heads)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Perceptron(nn.Module):
    """Two layers, the first twice as wide."""

    def __init__(self, width: int):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


NAMES = {
    "torch": torch,
    "F": F,
    "nn": nn,
    "math": math,
    "checkpoint": checkpoint,
    "Shard": Shard,
    "Replicate": Replicate,
    "DTensor": DTensor,
    "move": move,
    "through_whole": through_whole,
    "through_local": through_local,
    "Block": Block,
    "Perceptron": Perceptron,
}


def function_of(source: str, name: str = "program"):
    """The function that `source` defines; tracebacks and Dynamo see its lines."""
    file = f"<fuzz {abs(hash(source)):x}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    space: dict[str, Any] = dict(NAMES)
    exec(compile(source, file, "exec"), space)
    return space[name]


def values_of(shape: tuple[int, ...], dtype: str, high: int, seed: int) -> torch.Tensor:
    """Numbers that are the same wherever they are made; of integers, all below `high`."""
    g = torch.Generator().manual_seed(seed)
    if dtype == "int64":
        return torch.randint(0, max(high, 1), shape, generator=g)
    return torch.randn(shape, generator=g, dtype=torch.float64).to(getattr(torch, dtype))


def plain_inputs(program: Program, batch: int | None = None) -> list[torch.Tensor]:
    """The inputs as plain leaves; `batch` is the length of the batch, if it is another."""
    made = []
    for seed, x in enumerate(program.inputs):
        shape = tuple([batch if batch is not None and d == x.batch else n for d, n in enumerate(x.shape)])
        made.append(values_of(shape, x.dtype, x.high, seed).requires_grad_(x.grad))
    return made


def plain_modules(program: Program) -> list[nn.Module]:
    """The modules with parameters that are the same wherever they are made."""
    made = []
    for m in program.modules:
        module = eval(m.text, dict(NAMES)).double()
        with torch.no_grad():
            for seed, p in enumerate(module.parameters()):
                p.copy_(values_of(tuple(p.shape), "float64", 0, 100 + seed) * 0.5)
        made.append(module)
    return made


def parsed(placement: str):
    """The placement that a word of `Input.placements` stands for."""
    return {"R": Replicate(), "P": Partial()}.get(placement) or Shard(int(placement[1:]))


def distributed(x: torch.Tensor, mesh: Any, placements: tuple[str, ...]) -> torch.Tensor:
    """The leaf DTensor whose whole is `x`. Of a sum, each rank holds a part other than the others'."""
    target = [parsed(p) for p in placements]
    if "P" not in placements:
        return distribute_tensor(x.detach(), mesh, target, src_data_rank=None).requires_grad_(x.requires_grad)
    cut = [Replicate() if p == "P" else q for p, q in zip(placements, target)]
    part = distribute_tensor(x.detach(), mesh, cut, src_data_rank=None).to_local()
    for axis, p in enumerate(placements):
        if p == "P":
            n, me = mesh.size(axis), mesh.get_local_rank(axis)
            share = 1 / 2 ** (me + 1) if me < n - 1 else 1 / 2 ** (n - 1)
            part = part * share
    made = DTensor.from_local(part, mesh, target, shape=x.shape, stride=x.stride())
    return made.detach().requires_grad_(x.requires_grad)


@dataclass
class Result:
    """What a program gave: by name, values of outputs and of inputs it may have written to, and gradients."""

    tensors: dict[str, torch.Tensor | None] = field(default_factory=dict)


def total(outputs) -> torch.Tensor | None:
    """The loss: it has another derivative in every element."""
    terms = [x.square().sum() for x in outputs if x.requires_grad]
    return sum(terms[1:], terms[0]) if terms else None


def differentiated(loss, leaves, twice: bool) -> None:
    """Backward from `loss`; with `twice`, from the squares of its gradients."""
    if loss is None:
        return
    if twice:
        grads = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
        loss = total([g for g in grads if g is not None])
    if loss is not None:
        loss.backward()


def collect(program: Program, inputs, modules, outputs, whole=lambda x: x) -> Result:
    """What is compared, as plain tensors."""
    found = Result()

    def keep(name, x):
        found.tensors[name] = None if x is None else whole(x.detach())

    for name, x in zip(program.outputs, outputs):
        keep(name, x)
    for x, given in zip(inputs, program.inputs):
        keep(f"{given.name}.grad" if given.grad else given.name, x.grad if given.grad else x)
    for m, given in zip(modules, program.modules):
        for name, p in m.named_parameters():
            keep(f"{given.name}.{name}.grad", p.grad)
    return found


def reference(program: Program, *, twice: bool = False, batch: int | None = None, wrap=lambda f: f) -> Result:
    """What the program gives on one device; `wrap` may compile it."""
    inputs, modules = plain_inputs(program, batch), plain_modules(program)
    outputs = wrap(function_of(program.source))(*inputs, *modules)
    leaves = [x for x in inputs if x.requires_grad] + [p for m in modules for p in m.parameters()]
    differentiated(total(outputs), leaves, twice)
    return collect(program, inputs, modules, outputs)
