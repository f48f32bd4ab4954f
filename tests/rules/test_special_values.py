"""Reductions over sharded dims of values that backends treat each in their own way, against one device.

Programs are drawn: an operator, a dtype, a shape, placements, and values among which are NaN, infinities, zeros of both
signs, ties, and the ends of a dtype's range. They run over gloo, as threads and simulated ranks reduce by torch.
"""

import math
import random

import pytest
import torch
from torch.nn import functional as F

from dtensor import DTensor, Partial, PlacementError, Replicate, Shard, distribute_tensor, init_device_mesh
from dtensor.parallel import clip_grad_norm_
from dtensor.testing import run_ranks, with_ranks

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
NUMBERS = (*FLOATS, *INTEGERS)
ALL = (*NUMBERS, torch.bool)
inf, nan = float("inf"), float("nan")

OPERATORS = {
    "max": (ALL, lambda x, d, k: x.max()),
    "min": (ALL, lambda x, d, k: x.min()),
    "amax": (ALL, lambda x, d, k: x.amax(d, k)),
    "amin": (ALL, lambda x, d, k: x.amin(d, k)),
    "aminmax": (ALL, lambda x, d, k: torch.stack(torch.aminmax(x, dim=d, keepdim=k))),
    "max.dim": (ALL, lambda x, d, k: x.max(d, k)),
    "min.dim": (ALL, lambda x, d, k: x.min(d, k)),
    "argmax": (NUMBERS, lambda x, d, k: x.argmax(d, k)),
    "argmin": (NUMBERS, lambda x, d, k: x.argmin(d, k)),
    "argmax of all": (NUMBERS, lambda x, d, k: x.argmax()),
    "cummax": (NUMBERS, lambda x, d, k: x.cummax(d)),
    "median": (NUMBERS, lambda x, d, k: x.median(d, k).values),
    "nanmedian": (FLOATS[:2], lambda x, d, k: x.nanmedian(d, k).values),
    "norm inf": (FLOATS, lambda x, d, k: torch.linalg.vector_norm(x, inf, d, k)),
    "norm -inf": (FLOATS, lambda x, d, k: torch.linalg.vector_norm(x, -inf, d, k)),
    "norm 0": (FLOATS, lambda x, d, k: torch.linalg.vector_norm(x, 0, d, k)),
    "norm 1": (FLOATS, lambda x, d, k: torch.linalg.vector_norm(x, 1, d, k)),
    "norm 2": (FLOATS, lambda x, d, k: torch.linalg.vector_norm(x, 2, d, k)),
    "sum": (ALL, lambda x, d, k: x.sum(d, k)),
    "nansum": (FLOATS, lambda x, d, k: x.nansum(d, k)),
    "mean": (FLOATS, lambda x, d, k: x.mean(d, k)),
    "nanmean": (FLOATS, lambda x, d, k: x.nanmean(d, k)),
    "prod": (ALL, lambda x, d, k: x.prod(d, k)),
    "prod of all": (ALL, lambda x, d, k: x.prod()),
    "cumsum": (ALL, lambda x, d, k: x.cumsum(d)),
    "cumprod": (NUMBERS, lambda x, d, k: x.cumprod(d)),
    "any": (ALL, lambda x, d, k: x.any(d, k)),
    "all": (ALL, lambda x, d, k: x.all(d, k)),
    "count_nonzero": (ALL, lambda x, d, k: x.count_nonzero(d)),
    "var": (FLOATS, lambda x, d, k: x.var(d, keepdim=k)),
    "std": (FLOATS, lambda x, d, k: x.std(d, keepdim=k)),
    "logsumexp": (FLOATS, lambda x, d, k: x.logsumexp(d, k)),
    "softmax": (FLOATS, lambda x, d, k: x.softmax(d)),
    "log_softmax": (FLOATS, lambda x, d, k: x.log_softmax(d)),
    "cross_entropy": (FLOATS[:2], lambda x, d, k: F.cross_entropy(x, torch.zeros_like(x).softmax(-1))),
    "max of both signs": (FLOATS, lambda x, d, k: (-x).amax(d, k) + x.amin(d, k)),
    "max, then linear": (FLOATS, lambda x, d, k: x.amax(d, k) * 2 - 1),
    "clamped by its mean": (FLOATS[:2], lambda x, d, k: x.clamp(max=x.mean())),
    "equal": (ALL, lambda x, d, k: torch.tensor(torch.equal(x, x.clone()))),
    "allclose": (FLOATS, lambda x, d, k: torch.tensor(torch.allclose(x, x.clone(), equal_nan=k))),
}
"""Name -> dtypes, and the operator on a tensor, a dim, and whether to keep it."""

SPECIAL = {
    "nan": [nan],
    "infinite": [inf, -inf],
    "nan and infinite": [nan, inf, -inf],
    "zeros": [0.0, -0.0],
    "negative": [-1.0, -2.0, -0.0],
    "ties": [1.0, 2.0],
    "large": [60000.0, -60000.0],
    "minus infinity": [-inf],
}


PROGRAMS = [
    (name, dtype, kind)
    for kind in SPECIAL
    for name, (dtypes, _) in OPERATORS.items()
    for dtype in dtypes
    if dtype.is_floating_point or kind == "ties"
]
"""Every operator with every dtype and kind of values; the rest of a program is drawn."""


def values(draw, dtype, shape, kind):
    """A tensor of `dtype`: drawn numbers, some or all of which are special ones."""
    seeded = torch.Generator().manual_seed(draw.randrange(2**31))
    if dtype == torch.bool:
        return torch.rand(shape, generator=seeded) < draw.choice((0.0, 0.1, 0.9, 1.0))
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        least, most = draw.choice(
            ((-3 if limits.min else 0, 4), (limits.min, limits.max), (limits.max - 1, limits.max))
        )
        return torch.randint(least, most, shape, generator=seeded, dtype=dtype)
    x = torch.randn(shape, generator=seeded)
    chosen = torch.tensor([draw.choice(SPECIAL[kind]) for _ in range(x.numel())]).view(shape)
    where = torch.rand(shape, generator=seeded) < draw.choice((0.1, 0.3, 1.0))
    return torch.where(where, chosen, x).to(dtype)


def placements(draw, ndim, axes):
    return [draw.choice([Replicate(), *map(Shard, range(ndim)), *map(Shard, range(ndim))]) for _ in range(axes)]


def whole(x):
    if isinstance(x, (tuple, list)):
        return [whole(y) for y in x]
    return x.full_tensor() if isinstance(x, DTensor) else x


def compare(got, want, x, text):
    """Integers, and what is one of the values, equal; else as sums of such values are rounded in their dtype."""
    if isinstance(want, (tuple, list)):
        for a, b in zip(got, want, strict=True):
            compare(a, b, x, text)
        return
    ways = {"rtol": 0.0, "atol": 0.0}
    if want.dtype.is_floating_point:
        finite = x[x.isfinite()].abs().double()
        eps = torch.finfo(want.dtype).eps
        ways = {"rtol": 16 * eps, "atol": 4 * eps * (finite.max().item() if finite.numel() else 1.0)}
    torch.testing.assert_close(got, want, equal_nan=True, msg=lambda m: f"{text}\n{m}", **ways)


def run_program(number, mesh, axes, compiled=False):
    """Draw program `number` and compare it with one device."""
    draw = random.Random(number)
    name, dtype, kind = PROGRAMS[number % len(PROGRAMS)]
    _, f = OPERATORS[name]
    shape = [draw.choice((1, 2, 3, 5, 8)) for _ in range(draw.choice((1, 2, 2, 3)))]
    x, where = values(draw, dtype, shape, kind), placements(draw, len(shape), axes)
    dim, keep = draw.randrange(len(shape)), draw.random() < 0.3
    text = f"program {number}: {name} of {dtype}, dim {dim} of {where}, compiled {compiled}: {x.tolist()}"

    def g(x):
        return f(x, dim, keep)

    want = g(x)
    d = distribute_tensor(x, mesh, where, src_data_rank=None)
    if compiled:
        torch.compiler.reset()
        g = torch.compile(g, backend="dtensor", options={"inner": "aot_eager"})
    try:
        got = whole(g(d))
    except Exception as error:
        error.add_note(text)
        raise
    compare(got, want, x, text)


@with_ranks(2)
def test_programs(rank):
    mesh = init_device_mesh("cpu", (2,))
    for number in range(0, len(PROGRAMS), 9):
        run_program(number, mesh, 1)


@with_ranks(2)
def test_nan_of_each_rank(rank):
    """Eager and compiled: whichever rank holds it, the maximum is NaN, and clipping by it raises."""
    mesh = init_device_mesh("cpu", (2,))

    def f(x):
        return x.amax(), x.amin(), x.norm(inf)

    compiled = torch.compile(f, backend="dtensor", fullgraph=True)
    for dtype in (torch.float32, torch.bfloat16):
        for where in (0, 3):
            x = torch.tensor([1.0, 2.0, -3.0, 4.0], dtype=dtype)
            x[where] = -nan
            d = distribute_tensor(x, mesh, [Shard(0)])
            for g in (f, compiled):
                assert [y.full_tensor().isnan().item() for y in g(d)] == [True] * 3
            p = torch.nn.Parameter(d.clone())
            p.grad = d
            with pytest.raises(RuntimeError, match="norm of order inf of the gradients is nan"):
                clip_grad_norm_([p], 1.0, norm_type=inf, error_if_nonfinite=True)


REDUCED = {
    "sum": lambda rows: rows.sum(0, dtype=rows.dtype),
    "product": lambda rows: rows.prod(0, dtype=rows.dtype),
    "max": lambda rows: rows.amax(0),
    "min": lambda rows: rows.amin(0),
}


@with_ranks(2)
def test_partial_values_of_every_dtype(rank):
    """All-reduced and reduce-scattered, of an even and an uneven length, as torch reduces the ranks' values."""
    mesh = init_device_mesh("cpu", (2,))
    unsigned = (torch.uint16, torch.uint32, torch.uint64)
    for number, dtype in enumerate((*ALL, *unsigned)):
        for op, reduce in REDUCED.items():
            draw = random.Random(number)
            for length in (4, 5):
                if dtype in unsigned:
                    rows = torch.tensor(
                        [[1, 2, 2**15 + 1, torch.iinfo(dtype).max, 7][:length], [3] * length], dtype=dtype
                    )
                    exact = [int(a) + int(b) if op == "sum" else int(a) * int(b) for a, b in zip(*rows.tolist())]
                    exact = (
                        [max(a, b) if op == "max" else min(a, b) for a, b in zip(*rows.tolist())]
                        if op[0] == "m"
                        else exact
                    )
                    want = torch.tensor([n % (torch.iinfo(dtype).max + 1) for n in exact], dtype=dtype)
                else:
                    rows = values(draw, dtype, (2, length), "nan and infinite")
                    want = reduce(rows)
                d = DTensor.from_local(rows[rank], mesh, [Partial(op)])
                for target in (Replicate(), Shard(0)):
                    got = d.redistribute(placements=[target])
                    assert got.to_local().dtype == dtype
                    torch.testing.assert_close(got.full_tensor(), want, equal_nan=True)


@pytest.mark.parametrize(
    ("dtype", "op"), [(torch.complex64, "max"), (torch.complex64, "product"), (torch.int64, "avg")]
)
def test_reductions_without_a_meaning(fake_mesh, dtype, op):
    with pytest.raises(PlacementError, match=rf"cannot be Partial\('{op}'\)"):
        DTensor.from_local(torch.ones(2, dtype=dtype), fake_mesh(2), [Partial(op)])


@with_ranks(2)
def test_half_precision_adds_up_as_one_device_does(rank):
    """Sums of which a mean and a variance are made exceed what float16 holds."""
    mesh = init_device_mesh("cpu", (2,))
    x = torch.full((4096,), 100.0, dtype=torch.half)
    x[::2] += 1
    d = distribute_tensor(x, mesh, [Shard(0)])
    for f in (torch.mean, torch.var, torch.std, lambda x: x.logsumexp(0), lambda x: x.log_softmax(0)):
        torch.testing.assert_close(whole(f(d)), f(x), rtol=1e-3, atol=1e-3)


def all_programs(rank, axes):
    mesh = init_device_mesh("cpu", axes)
    for number in range(2 * len(PROGRAMS)):
        run_program(number, mesh, len(axes))


@pytest.mark.nightly
@pytest.mark.parametrize("axes", [(2,), (3,), (2, 2)])
def test_all_programs(axes):
    run_ranks(all_programs, math.prod(axes), axes, timeout=900)


@pytest.mark.nightly
@with_ranks(2, timeout=1200)
def test_compiled_programs(rank):
    mesh = init_device_mesh("cpu", (2,))
    for number in range(0, len(PROGRAMS), 5):
        run_program(number, mesh, 1, compiled=True)
