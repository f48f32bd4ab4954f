"""Indices out of range: where one device raises, so does every rank that sees the index, and nowhere else."""

import pytest
import torch
import torch.nn.functional as F

from dtensor import Replicate, Shard, distribute_tensor, implicit_replication, init_device_mesh
from dtensor.parallel import linear_cross_entropy
from dtensor.testing import RankError, run_threads, with_threads

REFUSED = (IndexError, RuntimeError)


def values(*shape):
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)


def losses(**options):
    return lambda x, i: F.cross_entropy(x, i, **options)


# Name: the operator, shape of the source, shape of the index, the length that indices point into, whether they wrap.
TABLE = {
    "embedding": (lambda x, i: F.embedding(i, x, padding_idx=2), (6, 4), (3,), 6, False),
    "embedding 2-D": (lambda x, i: F.embedding(i, x), (5, 4), (2, 2), 5, False),
    "embedding_bag": (lambda x, i: F.embedding_bag(i, x), (6, 4), (2, 2), 6, False),
    "index_select": (lambda x, i: x.index_select(0, i), (64, 4), (4,), 64, False),
    "index_select 1": (lambda x, i: x.index_select(1, i), (4, 63), (3,), 63, False),
    "index": (lambda x, i: x[i], (64, 4), (4,), 64, True),
    "index 1": (lambda x, i: x[:, i], (4, 63), (2, 2), 63, True),
    "index twice": (lambda x, i: x[i, i], (6, 6), (3,), 6, True),
    "gather": (lambda x, i: x.gather(0, i), (64, 4), (3, 4), 64, False),
    "take": (lambda x, i: x.take(i), (8, 8), (4,), 64, True),
    "take_along_dim": (lambda x, i: x.take_along_dim(i, 1), (4, 64), (4, 3), 64, True),
    "scatter": (lambda x, i: x.scatter(0, i, 1.0), (6, 4), (3, 4), 6, False),
    "scatter_add": (lambda x, i: x.scatter_add(0, i, values(3, 4)), (6, 4), (3, 4), 6, False),
    "scatter_reduce": (lambda x, i: x.scatter_reduce(1, i, values(4, 3), "amax"), (4, 6), (4, 3), 6, False),
    "index_add": (lambda x, i: x.index_add(0, i, values(3, 4)), (6, 4), (3,), 6, False),
    "index_copy": (lambda x, i: x.index_copy(0, i, values(3, 4)), (6, 4), (3,), 6, False),
    "index_fill": (lambda x, i: x.index_fill(0, i, 1.0), (6, 4), (3,), 6, True),
    "index_put": (lambda x, i: x.index_put((i,), torch.tensor(1.0)), (6, 4), (3,), 6, True),
    "index_put added": (lambda x, i: x.index_put((i,), values(3, 4), accumulate=True), (6, 4), (3,), 6, True),
    "put": (lambda x, i: x.put(i, values(3)), (6, 4), (3,), 24, True),
    "nll_loss": (F.nll_loss, (3, 6), (3,), 6, False),
    "nll_loss 2-D": (F.nll_loss, (3, 6, 2), (3, 2), 6, False),
    "cross_entropy": (losses(), (3, 6), (3,), 6, False),
    "cross_entropy weighted": (lambda x, i: F.cross_entropy(x, i, values(6), reduction="none"), (3, 6), (3,), 6, False),
    "cross_entropy smoothed": (losses(label_smoothing=0.1), (3, 6), (3,), 6, False),
    "linear_cross_entropy": (lambda x, i: linear_cross_entropy(values(3, 4), x, i, chunk=2), (6, 4), (3,), 6, False),
    "one_hot": (lambda x, i: F.one_hot(i, 6), (6, 4), (3,), 6, False),
    "multi_margin_loss": (F.multi_margin_loss, (3, 6), (3,), 6, False),
}
KINDS = ("too large", "too negative", "legal negative")
MASKED = ("embedding", "index_select", "index 1", "gather", "nll_loss 2-D", "cross_entropy", "linear_cross_entropy")
"""Operators that look up in a sharded dimension what is there, each in one form."""


def case(name, kind, dtype=torch.int64):
    """The function, source and index; None if the operator has no such index."""
    f, shape, index_shape, size, wraps = TABLE[name]
    bad = {"too large": size, "too negative": -size - 1 if wraps else -1, "legal negative": -size}[kind]
    if kind == "legal negative" and not wraps:
        return None
    index = torch.arange(torch.Size(index_shape).numel()).remainder(size)
    index[-1] = bad
    return f, values(*shape), index.reshape(index_shape).to(dtype)


def on_ranks(rank, n, f, x, index, x_at, index_at, seen):
    mesh = init_device_mesh("cpu", (n,))
    x = distribute_tensor(x, mesh, [x_at], src_data_rank=None)
    index = distribute_tensor(index, mesh, [index_at], src_data_rank=None)
    try:
        with implicit_replication():
            found = f(x, index)
    except REFUSED as error:
        seen[rank] = error
        raise
    return found.full_tensor()


def check(name, kind, n=2, dtype=torch.int64):
    made = case(name, kind, dtype)
    if made is None:
        return
    f, x, index = made
    try:
        wanted = f(x, index)
    except REFUSED as error:
        wanted = error
    for x_at in (Replicate(), *map(Shard, range(x.dim()))):
        for index_at in (Replicate(), *map(Shard, range(index.dim()))):
            seen = {}
            where = f"{name}, {kind}: {x_at}, {index_at}"
            try:
                found = run_threads(on_ranks, n, n, f, x, index, x_at, index_at, seen, timeout=60)
            except RankError:
                assert isinstance(wanted, Exception), f"{where}: {seen}"
                assert seen, where
                assert all(type(e) is type(wanted) for e in seen.values()), f"{where}: {wanted!r}, {seen}"
            else:
                assert not isinstance(wanted, Exception), f"{where}: gave {found[0]}, one device {wanted!r}"
                assert all(torch.allclose(y, wanted) for y in found), where


@pytest.mark.filterwarnings("ignore:.*has no sharding rule")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TABLE)
def test_as_on_one_device(name, kind):
    check(name, kind)


NAMED = {
    "embedding": (0, 0),
    "embedding 2-D": (0, 0),
    "index_select": (0, 0),
    "index_select 1": (1, 1),
    "index": (0, 0),
    "index 1": (1, 1),
    "gather": (0, 0),
    "nll_loss": (1, 1),
    "nll_loss 2-D": (1, 1),
    "cross_entropy": (1, 1),
    "cross_entropy weighted": (1, 1),
    "linear_cross_entropy": (0, 0),
}
"""Operators that look up in a sharded dimension: along which x is sharded, and the dimension that the error names."""


@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize("name", NAMED)
def test_each_error_names_index_dim_and_size(name, kind):
    made = case(name, kind)
    assert made is not None
    f, x, index = made
    word, (at, dim) = "Target" if "loss" in name or "entropy" in name else "index", NAMED[name]
    message = rf"^{word} {index.flatten()[-1]} is out of bounds for dimension {dim} with size {x.shape[at]}$"

    def run(rank):
        mesh = init_device_mesh("cpu", (2,))
        place = [distribute_tensor(t, mesh, [p]) for t, p in ((x, Shard(at)), (index, Replicate()))]
        with implicit_replication(), pytest.raises(REFUSED, match=message):
            f(*place)

    run_threads(run, 2)


def test_the_error_names_index_dim_and_size():
    def run(rank):
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(values(64, 3), mesh, [Shard(0)])
        index = distribute_tensor(torch.tensor([3, 70]), mesh, [Replicate()])
        with pytest.raises(IndexError, match=r"^index 70 is out of bounds for dimension 0 with size 64$"):
            x.index_select(0, index)
        several = distribute_tensor(torch.tensor([3, 70, 80, -1]), mesh, [Replicate()])
        with pytest.raises(IndexError, match=r"^index 70 is out of bounds for dimension 0 with size 64$"):
            x.index_select(0, several)  # the first one that is wrong
        with pytest.raises(IndexError, match=r"^index -70 is out of bounds for dimension 0 with size 64$"):
            x[index * -1]
        scores = distribute_tensor(values(2, 6), mesh, [Shard(1)])
        with pytest.raises(IndexError, match=r"^Target 70 is out of bounds for dimension 1 with size 6$"):
            F.cross_entropy(scores, index)

    run_threads(run, 2)


@pytest.mark.parametrize("ignored", [-100, -1, 2, 7])
@with_threads(2)
def test_the_ignored_class_stays_legal(rank, ignored):
    mesh = init_device_mesh("cpu", (2,))
    scores, weight, target = values(4, 6).sin(), values(6, 3).cos(), torch.tensor([0, ignored, 5, ignored])
    wanted = F.cross_entropy(scores, target, ignore_index=ignored)
    index = distribute_tensor(target, mesh, [Replicate()])
    found = F.cross_entropy(distribute_tensor(scores, mesh, [Shard(1)]), index, ignore_index=ignored)
    assert torch.allclose(found.full_tensor(), wanted)
    x = values(4, 3).sin()
    wanted = F.cross_entropy(x @ weight.T, target, ignore_index=ignored)
    sharded = [distribute_tensor(x, mesh, [Replicate()]), distribute_tensor(weight, mesh, [Shard(0)])]
    found = linear_cross_entropy(*sharded, index, ignore_index=ignored)
    assert torch.allclose(found.full_tensor(), wanted)


LOOK_UPS = {
    "embedding": (lambda x, i: F.embedding(i, x), 0),
    "index_select": (lambda x, i: x.index_select(0, i), 0),
    "index": (lambda x, i: x[i], 0),
    "gather": (lambda x, i: x.gather(1, i.unsqueeze(0).expand(4, -1)), 1),
    "cross_entropy": (lambda x, i: F.cross_entropy(x, i), 1),
    "linear_cross_entropy": (lambda x, i: linear_cross_entropy(x.T[:4, :2] * 0 + 1, x[:, :2], i), 0),
}


def compiled_refuses(fake_mesh, name, backend, refused=REFUSED):
    """A compiled step, forward and backward, is right for legal indices and raises for those that are not."""
    f, dim = LOOK_UPS[name]
    mesh = fake_mesh(2)
    x = distribute_tensor(values(4, 64) if dim else values(64, 4), mesh, [Shard(dim)], src_data_rank=None)
    x.requires_grad_()

    @torch.compile(backend="dtensor", options={"inner": backend})
    def step(x, i):
        return f(x, i).sum().to_local()

    for number, legal in ((1, True), (64, False), (-1, name == "index"), (-65, False)):
        index = distribute_tensor(torch.tensor([0, 1, 2, number]), mesh, [Replicate()], src_data_rank=None)
        if legal:
            step(x, index).backward()
            continue
        with pytest.raises(refused, match=r"(?i)out of (bounds|range|DATA bounds)"):
            step(x, index)


@pytest.mark.parametrize("name", LOOK_UPS)
def test_compiled(fake_mesh, name):
    compiled_refuses(fake_mesh, name, "aot_eager")


@pytest.mark.parametrize("name", ["embedding", pytest.param("cross_entropy", marks=pytest.mark.nightly)])
def test_inductor_asserts(fake_mesh, name):
    compiled_refuses(fake_mesh, name, "inductor")


@pytest.mark.parametrize("name", MASKED)
def test_int32_and_ranks_without_rows(name):
    for kind in KINDS:
        check(name, kind, n=4, dtype=torch.int64 if "loss" in name or "entropy" in name else torch.int32)
