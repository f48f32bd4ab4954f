"""Linear algebra on batches: every candidate by brute force."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh

from dtensor import Shard, distribute_tensor
from dtensor.rules import SHAPES
from dtensor.rules.grouped_rows import aligned
from dtensor.testing import with_threads
from dtensor.testing.rules.candidates import case as c
from dtensor.testing.rules.candidates import floats as f
from dtensor.testing.rules.candidates import integers as ints
from tests.rules.checking import check

aten = torch.ops.aten


def spd(*lead, n=3):
    """Symmetric positive definite matrices, far from singular."""
    x = f(*lead, n, n)
    return x @ x.mT + n * torch.eye(n, dtype=torch.float64)


def factorisation_cases():
    for lead in ((5,), (2, 4)):
        x, batch = spd(*lead), len(lead) + 1
        # The first is gone, and two are there, since torch 2.15.
        for name in ("cholesky", "linalg_matrix_sqrth", "linalg_polar"):
            if hasattr(aten, name):
                yield c(getattr(aten, name).default, x, at_least=batch)
        for op in (aten.linalg_cholesky_ex, aten.cholesky_inverse, aten.linalg_qr, aten.geqrf):
            yield c(op.default, x, at_least=batch)
        for op in (aten.linalg_lu, aten.linalg_lu_factor_ex, aten.linalg_ldl_factor_ex, aten.linalg_eig):
            yield c(op.default, x, at_least=batch)
        for op in (aten._linalg_det, aten._linalg_slogdet, aten.linalg_inv_ex, aten.linalg_matrix_exp):
            yield c(op.default, x, at_least=batch)
        yield c(aten._linalg_eigvals.default, x, at_least=batch)
        yield c(aten._linalg_eigh.default, x, at_least=batch)
        yield c(aten._linalg_eigh.default, x, "L", False, at_least=batch)
        yield c(aten._linalg_svd.default, x, at_least=batch)
        yield c(aten._linalg_svd.default, x, False, False, at_least=batch)
        yield c(aten.lu_unpack.default, *aten.linalg_lu_factor_ex.default(x)[:2], at_least=batch)
        yield c(aten.linalg_householder_product.default, *torch.geqrf(x), at_least=batch)
        yield c(aten.linalg_pinv.atol_rtol_tensor, x, at_least=batch, atol=f(), rtol=None)
        yield c(aten._linalg_check_errors.default, ints(1, *lead).int(), "linalg", at_least=batch, is_matrix=False)


def solver_cases():
    for lead in ((5,), (2, 4)):
        x, b, batch = spd(*lead), f(*lead, 3, 4), len(lead) + 1
        lower, row = torch.linalg.cholesky(x), f(*lead, 4, 3)
        # Nothing, the batch, the columns, linear in the right-hand side.
        yield c(aten.cholesky_solve.default, b, lower, at_least=batch + 3)
        yield c(aten.linalg_solve_triangular.default, lower, b, at_least=batch + 3, upper=False)
        yield c(aten.linalg_solve_triangular.default, lower, row, at_least=batch + 3, upper=False, left=False)
        yield c(aten.triangular_solve.default, b, lower, False, at_least=batch + 1)
        yield c(aten._linalg_solve_ex.default, x, b, at_least=batch + 1)
        yield c(aten._linalg_solve_ex.default, x, f(*lead, 3), at_least=batch)
        yield c(aten._linalg_solve_ex.default, x, row, at_least=batch + 1, left=False)
        lu, pivots, _ = aten.linalg_lu_factor_ex.default(x)
        yield c(aten.linalg_lu_solve.default, lu, pivots, b, at_least=batch + 3)
        yield c(aten.linalg_lu_solve.default, lu, pivots, f(3, 4), at_least=batch + 3)
        ld, pivots, _ = aten.linalg_ldl_factor_ex.default(x)
        yield c(aten.linalg_ldl_solve.default, ld, pivots, b, at_least=batch + 3)
        yield c(aten.ormqr.default, *torch.geqrf(x), b, at_least=batch + 3)
    x, y = f(4, 5, 3), f(1, 6, 3)
    yield c(aten._cdist_forward.default, x, y, 2.0, None, at_least=4)
    d = aten._cdist_forward.default(x, x, 2.0, None)
    yield c(aten._cdist_backward.default, f(4, 5, 5), x, x.clone(), 2.0, d, at_least=6)
    yield from [c(aten._cdist_forward.default, x, y, p, None, at_least=4) for p in (0.0, 0.5, 3.0, float("inf"))]
    yield c(aten._cdist_forward.default, x, y, 1.0, None, at_least=5)
    d = aten._cdist_forward.default(x, y, 1.0, None)
    yield c(aten._cdist_backward.default, f(4, 5, 6), x, y.expand(4, 6, 3).clone(), 1.0, d, at_least=7)


def product_cases():
    ends = torch.tensor([2, 5, 8], dtype=torch.int32)
    rows, columns = f(8, 8).float(), f(3, 8, 16).float()
    yield c(aten._grouped_mm.default, rows, columns, ends, at_least=4)
    yield c(aten._grouped_mm.default, f(3, 8, 8).float(), f(8, 8).float(), ends, at_least=4)
    yield c(aten._grouped_mm.default, f(4, 8).float(), f(8, 12).float(), ends, at_least=4)
    yield c(aten._grouped_mm.default, f(3, 4, 8).float(), f(3, 8, 12).float(), at_least=5)
    # As they are in a linear layer: transposed.
    yield c(aten._grouped_mm.default, rows, f(3, 16, 8).float().mT, ends, at_least=4)
    yield c(aten._grouped_mm.default, f(8, 4).float().t(), f(12, 8).float().t(), ends, at_least=4)
    yield c(aten._grouped_mm.default, f(3, 8, 8).float(), f(8, 8).float().t(), ends, at_least=4)
    eighths = [torch.randint(-4, 5, (16, 32)).div(8).to(torch.float8_e4m3fn) for _ in range(2)]
    one, narrow = torch.tensor(1.0), torch.bfloat16
    for scale in (one, torch.ones(1), torch.ones(1, 1)):
        yield c(aten._scaled_mm.default, eighths[0], eighths[1].t(), scale, scale, at_least=3)
    scales = [2.0 ** torch.randint(-2, 3, shape) for shape in ((16, 1), (1, 16))]
    yield c(aten._scaled_mm.default, eighths[0], eighths[1].t(), *scales, out_dtype=narrow, at_least=3)
    yield c(aten.addbmm.default, f(5, 3), f(4, 5, 6), f(4, 6, 3), at_least=9, beta=0.5)
    yield c(aten.addbmm.default, f(3), f(4, 5, 6), f(4, 6, 3), at_least=9)
    yield from [c(aten.addr.default, bias, f(5), f(3), at_least=7, alpha=2) for bias in (f(5, 3), f(3), f(5, 1), f())]
    yield c(aten._int_mm.default, ints(9, 32, 16).to(torch.int8), ints(9, 16, 16).to(torch.int8), at_least=8)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("group", [factorisation_cases, solver_cases, product_cases])
def test_every_candidate_is_right(group, n):
    check(group, n)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("x", "y"), [((8, 8), (3, 8, 16)), ((3, 8, 8), (8, 8)), ((4, 8), (8, 16)), ((3, 4, 8), (3, 8, 16))]
)
def test_shapes_of_products_of_groups(x, y, dtype):
    """On fake tensors torch tells them of one dtype only."""
    x, y = (torch.zeros(shape, dtype=dtype) for shape in (x, y))
    ends = None if x.dim() == y.dim() == 3 else torch.tensor([2, 5, 8], dtype=torch.int32)
    expected = aten._grouped_mm.default(x, y, ends)
    with FakeTensorMode() as mode:
        fakes = [None if t is None else mode.from_tensor(t) for t in (x, y, ends)]
        found = SHAPES["aten::_grouped_mm"](*fakes)
    assert (found.shape, found.dtype) == (expected.shape, dtype)


def of_transformers():
    ends, x, w = torch.tensor([2, 2, 5]), f(5, 8), f(3, 8, 12)
    ops = torch.ops.transformers
    yield c(ops.grouped_mm_fallback.default, x, w, ends, at_least=7)
    yield c(ops.grouped_mm_fallback_backward.default, x, w, ends, f(5, 12), at_least=5)


@pytest.mark.parametrize("n", [2, 4])
def test_products_of_groups_of_transformers(n):
    pytest.importorskip("transformers.integrations.moe", reason="transformers is not installed")
    check(of_transformers, n)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 5), (2, 4, 5), (2, 4, 8)])
def test_rows_or_columns_start_at_multiples_of_16_bytes(shape, dtype):
    x = f(*shape).to(dtype)
    still = [x[..., :1].expand(shape), x[..., :1, :].expand(shape).mT, x[..., :1, :1].expand(shape)]
    for given in (x, x.mT, *still, x.unsqueeze(-1).expand(*shape, 2)[..., 1], x[..., 1:], x[:, ::2]):
        made = aligned(given)
        assert torch.equal(made, given)
        assert 1 in made.stride()[-2:]
        turned = made.stride(-1) != 1
        assert turned == (given.stride(-1) != 1 and given.stride(-2) == 1)  # as the rows or columns lay
        rows = made.mT if turned else made
        assert all(n * dtype.itemsize % 16 == 0 for n in (*rows.stride()[:-1], rows.storage_offset()))
        if made.untyped_storage().data_ptr() != given.untyped_storage().data_ptr():
            assert rows.stride(-2) * dtype.itemsize < rows.shape[-1] * dtype.itemsize + 16
    long = f(2, 4, 16).to(dtype)
    assert aligned(long) is long
    assert aligned(long.mT).data_ptr() == long.data_ptr()


@with_threads(2)
def test_solve_and_its_gradient_on_a_sharded_batch(rank):
    mesh = init_device_mesh("cpu", (2,))
    a = torch.eye(3).expand(5, 3, 3) * 4 + torch.arange(45.0).reshape(5, 3, 3) / 45
    b = torch.arange(15.0).reshape(5, 3, 1)
    placed = [distribute_tensor(t, mesh, [Shard(0)]).requires_grad_() for t in (a, b)]
    dense = [t.clone().requires_grad_() for t in (a, b)]
    found, expected = torch.linalg.solve(*placed), torch.linalg.solve(*dense)
    assert found.placements == (Shard(0),)
    torch.testing.assert_close(found.full_tensor(), expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    for p, d in zip(placed, dense):
        assert p.grad.placements == (Shard(0),)
        torch.testing.assert_close(p.grad.full_tensor(), d.grad)
