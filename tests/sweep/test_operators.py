"""Torch's operator database on ranks: whatever runs on one device gives the same on DTensors, in every placement.

Forward and backward, in place and with out=, eager and compiled, on two ranks, four, and a mesh of two by two. Sizes in
the database rarely divide, so most shards are uneven and some are empty. In every run two ranks, two by two and the
compiler have one operator in 160 each, always the same and not another's; `pytest -m nightly` tries each everywhere.

Local tensors may lie in memory in another order than their DTensors say: operators that read memory are tried with such
ones, the others in the nightly run.

The gradients of gradients, by the arguments and by what flows back, are compared in double precision: eager, for one
operator in 64 on two ranks, for all of them there and on two by two in the nightly run.
"""

import itertools
import operator
import time
import zlib
from dataclasses import replace

import pytest
import torch

import dtensor
from dtensor.testing import run_ranks, with_ranks
from dtensor.testing.rules.operators import (
    NotPlain,
    disagreement,
    operator_database,
    operator_names,
    placements,
    samples,
    twice_differentiable,
)

SKIPPED = {
    "sparse.sampled_addmm": "takes a sparse tensor, and a DTensor is strided",
    "sparse.mm.reduce": "takes a sparse tensor, and a DTensor is strided",
    **dict.fromkeys(
        ["empty_like", "new_empty", "new_empty_strided", "empty_permuted", "empty_strided", "empty"],
        "its values are whatever lay in memory",
    ),
}
"""Operators that are not tried, and why."""

NOT_COMPILED = {
    "tensor_split": "torch loses the sizes of a tensor subclass's outputs where they come from another tensor's values",
}
"""Operators that are not tried under torch.compile, though plain tensors compile, and why."""

NOT_TWICE = {
    "nn.functional.linear_cross_entropy.chunked": "torch's own gradient is cut off from its graph; ours is not",
}
"""Operators of which gradients of gradients are not compared, and why."""

CALLS = {"__getitem__": operator.getitem}
"""What is called in place of the database's function: that one goes past the subclass's own method."""


def _product(out):
    u, s, v = out
    return u * s.unsqueeze(-2) @ v.mT


READ = {"svd_lowrank": _product, "pca_lowrank": _product}
"""What is compared where several results are right: the sign of singular vectors is a matter of rounding."""


def check(rank, shape, names, calls, ways, compiled, twice=False, shuffled=False, dtype=None):
    """What is wrong with the named operators, a line each, and how many calls were compared."""
    torch._dynamo.config.recompile_limit = 1 << 16
    mesh = dtensor.init_device_mesh("cpu", shape)
    wrong, compared = [], 0
    for name in names:
        start = time.monotonic()
        for sample in samples(name, calls, dtype or (torch.float64 if twice else torch.float32)):
            sample = replace(sample, call=CALLS.get(name, sample.call))
            if (compiled and name in NOT_COMPILED) or (sample.operator != name and (compiled or twice)):
                continue
            for where in placements(sample, mesh, ways)[1 if compiled else 0 :]:
                try:
                    text = one(sample, mesh, where, name, compiled, twice, shuffled)
                except NotPlain:
                    break
                except Exception as error:
                    text = f"{type(error).__name__}: {error}"[:400]
                compared += 1
                if text is not None:
                    wrong.append(f"{sample} {where}: {text}")
        if time.monotonic() - start > 600:
            wrong.append(f"{name} took {time.monotonic() - start:.0f} s")
    return wrong, compared


def one(sample, mesh, where, name, compiled, twice, shuffled):
    run = None
    if compiled:
        run = compile_whole(sample.call)
    try:
        read = READ.get(name, lambda out: out)
        return disagreement(sample, mesh, where, compiled=run, read=read, twice=twice, shuffled=shuffled)
    except Exception:
        if compiled:
            raise_unless_plain_compiles(sample)
        raise


def compile_whole(call):
    torch._dynamo.reset()
    return torch.compile(lambda *args, **kwargs: call(*args, **kwargs), backend="aot_eager", fullgraph=True)


def raise_unless_plain_compiles(sample):
    """Raise NotPlain if the call does not compile on plain tensors either."""
    plain = sample.fresh()
    try:
        made = compile_whole(sample.call)(*plain.args, **plain.kwargs)
        outputs = [o for o in torch.utils._pytree.tree_leaves(made) if isinstance(o, torch.Tensor) and o.requires_grad]
        if outputs:
            torch.autograd.backward(outputs, [torch.ones_like(o) for o in outputs])
    except Exception as error:
        raise NotPlain(str(error)) from error


NAMES = [name for name in operator_names() if name not in SKIPPED]
MESHES = {"2": (2,), "4": (4,), "2x2": (2, 2)}
PARTS = 4


def share(k):
    return [name for name in NAMES if zlib.crc32(name.encode()) % 160 == k]


RUNS = [
    *(pytest.param(m, share(k), False, id=f"{m}-share") for k, m in enumerate(MESHES) if m != "4"),
    pytest.param("2", share(len(MESHES)), True, id="compiled-share"),
]
NIGHTLY = [
    *(
        pytest.param(m, NAMES[part::PARTS], False, id=f"{m}-{part}", marks=pytest.mark.nightly)
        for m, part in itertools.product(MESHES, range(PARTS))
    ),
    *(
        pytest.param(m, NAMES[part::PARTS], True, id=f"compiled-{m}-{part}", marks=pytest.mark.nightly)
        for m, part in itertools.product(MESHES, range(PARTS))
    ),
]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("mesh", "names", "compiled"), RUNS + NIGHTLY)
def test_agrees_with_one_device(mesh, names, compiled, request):
    nightly = request.node.get_closest_marker("nightly") is not None
    calls, ways = (1, 3 if nightly else 2) if compiled else (6, 8) if nightly else (3, 4)
    shape = MESHES[mesh]
    nproc = shape[0] * shape[-1] if len(shape) > 1 else shape[0]
    results = run_ranks(check, nproc, shape, names, calls, ways, compiled, timeout=1700)
    wrong, compared = results[0]
    print(f"{compared} calls of {len(names)} operators compared")
    assert not wrong, "\n".join(wrong)
    assert compared > len(names) * (0.8 if compiled else 4)


SHUFFLED = [
    *("as_strided", "as_strided_copy", "as_strided_scatter", "resize_", "resize_as_", "view_as_complex", "stft"),
    *("nn.functional.group_norm", "nn.functional.pdist", "nn.functional.nll_loss", "nn.functional.max_pool3d"),
    "multinomial",
]
SHUFFLED_RUNS = [
    pytest.param(SHUFFLED, id="in-memory"),
    *(pytest.param(NAMES[part::PARTS], id=str(part), marks=pytest.mark.nightly) for part in range(PARTS)),
]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("names", SHUFFLED_RUNS)
def test_locals_in_another_order_in_memory(names):
    results = run_ranks(check, 2, (2,), names, 4, 4, False, False, True, timeout=1700)
    wrong, compared = results[0]
    print(f"{compared} calls of {len(names)} operators compared")
    assert not wrong, "\n".join(wrong)
    assert compared > len(names) * 4


TWICE = [name for name in twice_differentiable() if name not in SKIPPED | NOT_TWICE]
TWICE_RUNS = [
    pytest.param("2", [n for n in TWICE if zlib.crc32(n.encode()) % 64 == 7], id="2-share"),
    *(
        pytest.param(m, TWICE[part::PARTS], id=f"{m}-{part}", marks=pytest.mark.nightly)
        for m, part in itertools.product(("2", "2x2"), range(PARTS))
    ),
]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("mesh", "names"), TWICE_RUNS)
def test_gradients_of_gradients(mesh, names, request):
    nightly = request.node.get_closest_marker("nightly") is not None
    calls, ways = (5, 6) if nightly else (2, 4)
    shape = MESHES[mesh]
    results = run_ranks(check, 4 if len(shape) > 1 else shape[0], shape, names, calls, ways, False, True, timeout=1700)
    wrong, compared = results[0]
    print(f"{compared} calls of {len(names)} operators compared")
    assert not wrong, "\n".join(wrong)
    assert compared > len(names) * 3


COMPLEX = ("pinverse", "linalg.pinv", "linalg.lstsq", "linalg.lstsq.grad_oriented", "linalg.vector_norm", "linalg.norm")
"""Operators that were silently wrong on complex numbers: their kernels conjugate lazily, or were decomposed without
it."""


@with_ranks(2)
def test_complex_numbers(rank):
    wrong, compared = check(rank, (2,), COMPLEX, 3, 2, False, dtype=torch.complex64)
    assert not wrong, "\n".join(wrong)
    assert compared > 40


NOT_COMPLEX = {"istft", "sparse.sampled_addmm", "prod", "masked.prod", "pca_lowrank"}
"""Those that end in an error that says what to write (plain windows, sparse tensors, products over ranks), and one
whose random projections round otherwise."""


@pytest.mark.nightly
@with_ranks(2)
def test_all_operators_on_complex_numbers(rank):
    names = [n for n, op in operator_database().items() if op.supports_dtype(torch.complex64, "cpu")]
    names = [n for n in names if n not in NOT_COMPLEX and "empty" not in n]
    wrong, compared = check(rank, (2,), names, 2, 3, False, dtype=torch.complex64)
    assert not wrong, "\n".join(wrong)
    assert compared > 2500
