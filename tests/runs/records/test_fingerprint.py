"""Fingerprints: those of shards add up to that of the whole, and differences of tensors show in them."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dtensor.layout.layout import Layout
from dtensor.runs.records import fingerprint as fp

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.bool)
SHAPES = st.lists(st.integers(1, 70), min_size=0, max_size=4).filter(lambda s: math.prod(s) <= 20_000)
SEEDS = st.integers(0, 1000)


def made(shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    if dtype in (torch.int64, torch.bool):
        return torch.randint(0, 2 if dtype is torch.bool else 100, shape, generator=generator).to(dtype)
    return torch.randn(shape, dtype=dtype if dtype.is_complex else torch.float64, generator=generator).to(dtype)


def of(x, shape=None, offsets=None):
    shape = tuple(x.shape) if shape is None else shape
    return fp.fingerprint(x, shape, offsets or (0,) * x.dim()).numpy()


def assert_same(a, b):
    assert a.shape == b.shape
    np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9 * (1 + abs(float(b[fp.SQUARES])) ** 0.5))


@given(SHAPES, st.sampled_from(DTYPES), SEEDS, st.data())
def test_shards_add_up_to_the_whole(shape, dtype, seed, data):
    """However each dim is cut; some parts may be empty."""
    x = made(shape, dtype, seed)
    cuts = [
        [0, *sorted(data.draw(st.lists(st.integers(0, n), max_size=3), label=f"dim {d}")), n]
        for d, n in enumerate(shape)
    ]
    total = np.zeros(fp.length(fp.seen_shape(shape, dtype)))
    places = np.ndindex(*[len(c) - 1 for c in cuts])
    for place in places:
        box = [(cuts[d][k], cuts[d][k + 1]) for d, k in enumerate(place)]
        total += of(x[tuple([slice(a, b) for a, b in box])], tuple(shape), tuple([a for a, _ in box]))
    assert_same(total, of(x))


@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from([(2,), (3,), (2, 3)]), SEEDS, st.data())
def test_shards_of_a_mesh_add_up(rows, columns, mesh, seed, data):
    """Where its layout puts them: uneven ones, empty ones, and dims that two axes shard."""
    x = made((rows, columns), torch.float32, seed)
    dims = [[], []]
    for axis in range(len(mesh)):
        dims[data.draw(st.integers(0, 1))].append(axis)
    layout = Layout.make(len(mesh), tuple([tuple(axes) for axes in dims]), ())
    total = np.zeros(fp.length(x.shape))
    for place in np.ndindex(*mesh):
        box = layout.local_box(tuple(x.shape), mesh, place)
        total += of(x[tuple([slice(a, b) for a, b in box])], tuple(x.shape), tuple([a for a, _ in box]))
    assert_same(total, of(x))


@given(SHAPES, SEEDS)
def test_terms_of_a_sum_add_up(shape, seed):
    terms = [made(shape, torch.float64, seed + k) for k in range(3)]
    total, whole = np.sum([of(x) for x in terms], axis=0), of(sum(terms))
    total[fp.SQUARES] = whole[fp.SQUARES]  # those of a sum are no sum
    assert_same(total, whole)


@given(SHAPES, SEEDS)
def test_a_large_tensor_is_summed_in_blocks(shape, seed):
    x, kept = made(shape, torch.float32, seed), fp.BLOCK
    whole = of(x)
    try:
        fp.BLOCK = 64
        assert_same(of(x), whole)
    finally:
        fp.BLOCK = kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_what_is_not_finite_is_counted(dtype):
    x = made((6, 40), dtype)
    x[1, 3], x[4, 39], x[5, 0] = math.nan, math.inf, -math.inf
    clean = torch.where(torch.isfinite(x), x, torch.zeros_like(x))
    found, expected = of(x), of(clean)
    assert found[fp.NONFINITE] == 3
    if not dtype.is_complex:  # of a complex number the part that is finite still counts
        expected[fp.NONFINITE] = 3
        assert_same(found, expected)
    assert np.isfinite(found).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_a_scalar(dtype):
    x = made((), dtype)
    found = of(x)
    assert found.shape == (fp.length(fp.seen_shape((), dtype)),)
    assert found[fp.SQUARES] == pytest.approx(abs(x.to(torch.complex128).item()) ** 2)
    y = made((3, 5), dtype)
    assert of(y)[fp.SQUARES] == pytest.approx(y.to(torch.complex128).abs().square().sum().item())


def test_a_conjugate_and_a_transpose_are_what_they_show():
    x = made((5, 7), torch.complex64)
    assert_same(of(x.conj()), of(x.conj().resolve_conj()))
    assert_same(of(x.t()), of(x.t().contiguous()))


def test_an_empty_tensor_is_zero():
    assert not of(torch.empty(0, 3)).any()
    assert not of(torch.empty(0), (8,), (8,)).any()


@pytest.mark.parametrize("shape", [(1000,), (64, 64), (7, 100), (4, 16, 32), (3, 5, 7, 11)])
def test_the_norm_is_estimated(shape):
    """Within a factor of two on the average of seeds, and never far off."""
    ratios = []
    for seed in range(20):
        x = made(shape, torch.float64, seed)
        ratios.append(fp.norm(of(x), shape) / x.norm().item())
    assert 0.5 < np.mean(ratios) < 2
    assert 0.3 < min(ratios) < max(ratios) < 4


@pytest.mark.parametrize("shape", [(1000,), (64, 64), (4, 16, 32), (4, 16, 4, 1), (3, 5, 7, 11), (8, 1)])
def test_the_mean_of_estimates_is_closer_than_the_largest(shape):
    """Dims of few indices, whose estimates have few terms, make the largest one too large."""
    exact = [made(shape, torch.float64, seed) for seed in range(40)]
    mean = np.array([fp.mean_norm(of(x), shape) / x.norm().item() for x in exact])
    largest = np.array([fp.norm(of(x), shape) / x.norm().item() for x in exact])
    assert (mean <= largest + 1e-12).all()
    assert (mean**2).mean() == pytest.approx(1, abs=0.25)
    assert mean.min() > 0.4
    assert mean.max() < 2


@pytest.mark.parametrize("known", [True, False], ids=["whole", "joined"])
def test_an_estimate_that_is_too_small_by_chance_is_made_up_for(known):
    """As of parts along dim 0 that were joined, whose other signs are unknown: two sums of dim 0 may both be small."""
    shape, ratios, bounds = (2, 16, 32), [], []
    for seed in range(100):
        x = made(shape, torch.float64, seed)
        vector = of(x)
        for sums in fp.sums(vector, shape)[1:]:
            sums["signed"][:] *= 1 if known else np.nan
        ratios.append(fp.norm(vector, shape) / x.norm().item())
        bounds.append(fp.norm_at_most(vector, shape) / x.norm().item())
    assert max(bounds) < 4
    assert min(bounds) > 0.3
    assert sum([x < 0.6 for x in bounds]) <= 3
    assert known or sum([x < 0.6 for x in ratios]) > 10


def test_sums_without_signs_count_no_more_than_chance_explains():
    """They are much too large if a tensor is the same along dim 0."""
    x = made((1, 40), torch.float64).expand(1000, 40)
    vector = of(x)
    assert fp.sums(vector, x.shape)[1]["rows"] @ fp.sums(vector, x.shape)[1]["rows"] > 900 * x.square().sum()
    assert fp.norm_at_most(vector, x.shape) <= fp.CHANCE * fp.norm(vector, x.shape)


def test_one_element_is_found_in_its_range():
    x = torch.zeros(100, 64)
    x[57, 30] = 1e-3
    rows, columns = fp.sizes(of(x), (100, 64))
    assert rows.nonzero()[0].tolist() == [57 * 32 // 100]
    assert columns.nonzero()[0].tolist() == [15]
    a, b = fp.bounds(100, 57 * 32 // 100)
    assert a <= 57 < b
    assert fp.norm(of(x), (100, 64)) == pytest.approx(1e-3, rel=0.5)


@given(SEEDS, st.integers(0, 31), st.integers(0, 3), st.integers(1, 3))
def test_rows_that_change_places_within_a_range_are_seen(seed, which, first, by):
    x = made((128, 24), torch.float64, seed)
    order = list(range(128))
    i, j = 4 * which + first, 4 * which + (first + by) % 4
    order[i], order[j] = order[j], order[i]
    y = x[order]
    difference = of(y) - of(x)
    assert fp.norm(difference, (128, 24)) > 1e-7 * (y - x).norm().item()  # one projection of the rows' difference


@given(SEEDS, st.sampled_from([-1, 1, 3, 17]))
def test_a_roll_along_any_dim_is_seen(seed, by):
    x = made((40, 50), torch.float64, seed)
    for dim in (0, 1):
        y = x.roll(by, dim)
        assert fp.norm(of(y) - of(x), (40, 50)) > 0.2 * (y - x).norm().item()


@given(st.integers(1, 5000))
def test_ranges_cut_a_dim_without_gaps(n):
    ranges = fp.ranges(n, 0, n)
    edges = [fp.bounds(n, k) for k in range(min(n, fp.BUCKETS))]
    assert [a for a, _ in edges] == [0, *[b for _, b in edges[:-1]]]
    assert edges[-1][1] == n
    assert all((ranges[a:b] == k).all() for k, (a, b) in enumerate(edges))


def test_signs_are_balanced_and_differ_between_dims():
    a, b = fp.signs(0, 0, 10_000, 10_000), fp.signs(1, 0, 10_000, 10_000)
    assert set(a) == {-1.0, 1.0}
    assert abs(a.sum()) < 400
    assert abs((a * b).sum()) < 400
    assert (fp.signs(0, 123, 50, 10_000) == a[123:173]).all()


def test_angles_of_large_indices_are_exact():
    """As a whole, and put together from an offset and an index."""
    offset = 3_000_000_001
    whole, part = fp.angles(offset, 100), fp.angles(0, 100)
    np.testing.assert_allclose(np.exp(1j * whole), np.exp(1j * (part + fp.angles(offset, 1))), atol=1e-14)


@pytest.mark.parametrize("shape", [(4, 16, 32), (8, 8), (3, 5, 8), (64, 2), (16, 32, 16), (1, 128, 48)])
def test_what_is_the_same_along_dims_is_seen(shape):
    for same in itertools.product([False, True], repeat=len(shape)):
        x = torch.randn([1 if s else n for s, n in zip(same, shape)], generator=torch.Generator().manual_seed(3))
        whole = x.expand(shape).contiguous()
        for norm in (fp.norm, fp.mean_norm):
            assert 0.25 < norm(of(whole), shape) / whole.norm().item() < 4, same
