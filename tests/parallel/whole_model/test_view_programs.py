"""Random programs of one device as the forward of a model: what it makes, holds, writes to and computes, over ranks by
`distribute_model` against one device, with gradients.

Values lie in a list; a step picks some by number, and adds one or writes to one. A program that one device refuses (it
writes to what a gradient needs) is passed over.
"""

import copy
import random
import warnings

import pytest
import torch
from torch import nn

from dtensor import Shard, distribute_model, init_device_mesh, prepare
from dtensor.prices.links import Link
from dtensor.testing import run_ranks

COLUMNS = 6
LINKS = {
    "assumed": None,
    "fast": [Link(alpha=1e-9, bandwidth=1e14, memory=1e14, launch=1e-9, start=1e-9)],
    "slow to start": [Link(alpha=1e-7, bandwidth=1e15, memory=1e15, launch=1e-9, start=1e-9)],
}
"""Over links that are assumed programs as small as these gather and compute alike; over the others they share work."""
HOW = {
    "compiled": {"inner": "aot_eager"},
    "one by one": {"inner": "aot_eager", "decide": False},
}
PLANS = [{"tp": Shard(0)}, {"tp": Shard(1)}, {}]
MAKES = ("zeros", "table", "positions", "linear", "like", "number")
JOINS = ("add", "mul", "where", "stack", "product", "gather", "relu", "softmax", "mean", "turned", "sorted", "picked")
WRITES = ("add_", "mul_", "copy_", "rows", "columns", "index_add_", "masked", "slice_add", "fill_", "clamp_", "put")


class Program(nn.Module):
    def __init__(self, seed: int, rows: int = 4) -> None:
        super().__init__()
        self.rows = rows
        chance = random.Random(seed)
        kinds = ["linear", "zeros", *[chance.choice(MAKES) for _ in range(2)]]
        kinds += [chance.choice(MAKES * 1 + JOINS * 2 + WRITES * 3) for _ in range(chance.randint(3, 9))]
        self.steps = [(kind, chance.random(), chance.random(), chance.random()) for kind in kinds]
        self.weights = nn.ParameterList([nn.Parameter(_wave((COLUMNS, COLUMNS), k)) for k in range(2)])
        self.table = _wave((rows, COLUMNS), 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = [x]
        for kind, a, b, c in self.steps:
            step(self, kind, values, (a, b, c))
        return values[-1] + sum(values[:-1]).tanh()


def _wave(shape: tuple[int, ...], k: int) -> torch.Tensor:
    n = torch.Size(shape).numel()
    return torch.sin(torch.arange(n, dtype=torch.float64) * (k + 1) + k).view(shape)


def step(model: Program, kind: str, values: list[torch.Tensor], chances: tuple[float, float, float]) -> None:
    """Add a value, or write to one; all have `model.rows` rows and COLUMNS columns."""
    rows = model.rows
    a, b, c = (values[int(chance * len(values))] for chance in chances)
    k = int(chances[2] * 3)
    match kind:
        case "zeros":
            made = torch.full((rows, COLUMNS), 0.5 * k, dtype=torch.float64)
        case "table":
            made = model.table * (k + 1)
        case "positions":
            made = torch.arange(COLUMNS, dtype=torch.float64).expand(rows, COLUMNS).clone()
        case "linear":
            made = a @ model.weights[k % 2]
        case "like":
            made = torch.ones_like(a)
        case "number":
            made = a * torch.tensor(2.0, dtype=torch.float64) + k
        case "add":
            made = a + b
        case "mul":
            made = a * b
        case "where":
            made = torch.where(c.detach() > 0, a, b)
        case "stack":
            made = torch.stack([a, b, c]).mean(0)
        case "product":
            made = (a.softmax(0).mT @ b)[:rows]
        case "gather":
            made = a.gather(1, torch.arange(COLUMNS).expand(rows, COLUMNS).flip(1))
        case "relu":
            made = a.relu()
        case "softmax":
            made = a.softmax(k % 2)
        case "mean":
            made = a.mean(k % 2, keepdim=True).expand(rows, COLUMNS) + b
        case "turned":
            made = torch.cat([a[1:], b[:1]])
        case "sorted":
            made = a.sort(1).values
        case "picked":
            made = a[torch.tensor([3, 1, 0, 1, 2][:rows])]
        case _:
            write(kind, a, b * 1, c, k)
            return
    values.append(made)


def write(kind: str, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, k: int) -> None:
    match kind:
        case "add_":
            a += b
        case "mul_":
            a.mul_(b)
        case "copy_":
            a.copy_(b)
        case "rows":
            a[k] = b[0]
        case "columns":
            a[:, k : k + 2] = b[:, :2] * 2
        case "index_add_":
            a.index_add_(0, torch.tensor([1, 0, 3, 2]), b[:4])
        case "masked":
            a.masked_fill_(c.detach() > 0.3, 0.25)
        case "slice_add":
            a[:, ::2].add_(b[:, 1::2])
        case "fill_":
            a[k].fill_(0.75)
        case "clamp_":
            a.clamp_(-0.5, 0.5)
        case "put":
            a[torch.tensor([0, 2])] = b[:2]


def outcome(run, model: nn.Module, weight: torch.Tensor):
    """Output and gradients."""
    x = _wave(tuple(weight.shape), 2)
    out = run(x)
    (out * weight).sum().backward()
    return [out.detach(), *[p.grad for p in model.parameters()]]


def compare(rank: int, seeds: range, how: str) -> tuple[int, list[str]]:
    """How many programs were compared, and which are wrong."""
    compared, wrong = 0, []
    meshes = {links: init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)) for links in LINKS}
    for links, mesh in meshes.items():
        prepare(mesh, links=LINKS[links])
    for seed in seeds:
        rows, mesh = 4 + seed // 2 % 2, [*meshes.values()][seed % len(meshes)]
        plain, weight = Program(seed, rows), _wave((rows, COLUMNS), 9)
        model = copy.deepcopy(plain)
        try:
            expected = outcome(plain, plain, weight)
        except RuntimeError:
            continue
        torch.compiler.reset()
        plan = {"weights.0": PLANS[seed // 3 % 3], "weights.1": PLANS[seed // 9 % 3]}
        batch = _wave((rows, COLUMNS), 1) if how == "eager, decided" else None
        distribute_model(model, mesh, plan, outputs={}, batch=batch)
        run = model if how.startswith("eager") else torch.compile(model, backend="dtensor", options=HOW[how])
        compared += 1
        try:
            warnings.simplefilter("ignore")  # some programs cannot be recorded
            found = outcome(run, model, weight)
            for one, other in zip(found, expected):
                whole = one.full_tensor() if hasattr(one, "full_tensor") else one
                torch.testing.assert_close(whole, other)
        except Exception as error:
            wrong.append(f"{seed} {[kind for kind, *_ in plain.steps]}: {type(error).__name__}: {str(error)[:400]}")
    return compared, wrong


@pytest.mark.parametrize(
    ("seeds", "how"),
    [
        (range(24), "eager"),
        (range(6), "compiled"),
        (range(2111, 2112), "compiled"),
        (range(6), "eager, decided"),
        (range(1747, 1748), "eager, decided"),
        (range(1281, 1282), "eager, decided"),
        pytest.param(range(6, 24), "compiled", marks=pytest.mark.nightly),
        *(
            pytest.param(range(k, k + 200), how, marks=pytest.mark.nightly)
            for k in range(1000, 2000, 200)
            for how in ("eager", "compiled", "eager, decided")
        ),
        *(pytest.param(range(k, k + 200), "one by one", marks=pytest.mark.nightly) for k in range(2000, 2400, 200)),
    ],
)
def test_one_device(seeds, how):
    compared, wrong = run_ranks(compare, 2, seeds, how, timeout=1200)[0]
    assert not wrong, "\n".join(wrong)
    assert compared > len(seeds) / 3
