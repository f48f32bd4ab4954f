"""Views and their bases are one memory: whoever is written to, everyone reads what one device would have.

Tables of views and of writes; each pair runs as a short program on DTensors and on plain tensors. Some of the views
share memory with their base, others, of a sharded dimension that moved, are copies that have to follow it.
"""

import copy
import math

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dtensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from dtensor.dispatch.view_copies import copies
from dtensor.errors import OperatorError
from dtensor.testing import CountCollectives, fake_ranks, run_threads, with_threads

VIEWS = {
    "row": lambda x: x[0],
    "column": lambda x: x[:, 1],
    "element": lambda x: x[2, 1],
    "rows": lambda x: x[1:],
    "columns": lambda x: x[:, 1:],
    "steps": lambda x: x[::2],
    "flat": lambda x: x.view(-1),
    "flattened": lambda x: x.flatten(),
    "other shape": lambda x: x.view(x.shape[1], x.shape[0]),
    "reshaped": lambda x: x.reshape(2, 2, -1),
    "transposed and flat": lambda x: x.t()[1:],
    "chunk": lambda x: x.chunk(2)[1],
    "chunk of columns": lambda x: x.chunk(2, 1)[0],
    "split": lambda x: x.split([1, 3])[1],
    "unbound": lambda x: x.unbind(1)[2],
    "narrow": lambda x: x.narrow(0, 1, 2),
    "windows": lambda x: x.unfold(0, 2, 2),
    "windows of columns": lambda x: x.unfold(1, 3, 3),
    "diagonal": lambda x: x.diagonal(1),
    "squeezed": lambda x: x.narrow(0, 2, 1).squeeze(0),
    "unsqueezed": lambda x: x.unsqueeze(1)[1],
    "strided": lambda x: x.as_strided((2, 3), (6, 2), 1),
    "transposed": lambda x: x.t(),
    "permuted": lambda x: x.view(2, 2, 6).permute(2, 0, 1)[1:],
    "detached": lambda x: x.detach()[1:],
    "data": lambda x: x.data[0],
    "row of columns": lambda x: x[:, 1:][0],
    "flat part": lambda x: x.view(-1)[3:9],
    "in place": lambda x: x[1:].t_(),
    "squeezed in place": lambda x: x[1:2].squeeze_(0),
}
"""Views of a tensor of 4 x 6."""

WRITES = {
    "add": lambda v: v.add_(1),
    "mul": lambda v: v.mul_(2),
    "copy": lambda v: v.copy_(torch.ones_like(v) * 7),
    "fill": lambda v: v.fill_(3),
    "zero": lambda v: v.zero_(),
    "set first": lambda v: (v.select(-1, 0) if v.dim() else v).fill_(9),
    "set item": lambda v: v.__setitem__(..., 5),
    "masked fill": lambda v: v.masked_fill_(v > 10, -1),
    "index put": lambda v: v[None].index_put_((torch.zeros_like(v, dtype=torch.int64).flatten()[:1],), v.amax() + 1),
    "out": lambda v: torch.add(v, v, out=v),
    "foreach": lambda v: torch._foreach_mul_([v, torch.ones_like(v)], 3),
    "data": lambda v: v.data.sub_(2),
    "detached": lambda v: v.detach().sub_(2),
    "clamp": lambda v: v.clamp_(3, 9),
    "reversed": lambda v: v.copy_(v.flatten().flip(0).view(v.shape)),
}

PLACEMENTS = {
    "rows": ((2,), [Shard(0)]),
    "columns": ((2,), [Shard(1)]),
    "replicated": ((2,), [Replicate()]),
    "rows, one rank with none": ((3,), [Shard(0)]),
    "both": ((2, 2), [Shard(0), Shard(1)]),
    "columns twice": ((2, 2), [Shard(1), Shard(1)]),
    "rows by the second axis": ((2, 2), [Replicate(), Shard(0)]),
}
"""Meshes and placements; 4 rows by three ranks are 2, 2 and none, 6 columns by two axes 2, 1, 2 and 1."""


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def program(x, view, write, others: bool) -> dict:
    """Who is read in the end, by name, after writes to the base, to the view, to the base, and to a sibling."""
    before = x.t()
    early = x.data
    v = view(x)
    seen = {"base": x, "view": v}
    if others:
        seen |= {"sibling": x[:, 1:], "part": v[..., -1:] if v.dim() else v, "before": before}
    results = {}

    def note(step):
        results.update({f"{name} after {step}": whole(x).clone() for name, x in seen.items()})

    with torch.no_grad():
        write(x)
        note("base")
        write(v)
        note("view")
        x.add_(1)
        write(v)
        note("both")
        if others:
            write(early)
            write(seen["sibling"])
            x[1].mul_(2)
            note("sibling")
            write(before)
            write(seen["part"])
            note("part")
    return results


def compare(mesh, placements, view: str, write: str, others: bool) -> None:
    dense = torch.arange(24.0).view(4, 6)
    expected = program(dense.clone(), VIEWS[view], WRITES[write], others)
    x = distribute_tensor(dense, mesh, placements)
    found = program(x, VIEWS[view], WRITES[write], others)
    for name, value in expected.items():
        assert torch.equal(found[name], value), f"{view}, {write}, {placements}: {name}: {found[name]} is not {value}"


@pytest.mark.parametrize("where", PLACEMENTS)
def test_views_and_writes(where):
    """One pair in eight, each with one placement; every view and every write with several."""
    pairs_of(where, lambda i, j: i % 8 == j % 8 and (i + j) // 2 % len(PLACEMENTS) == list(PLACEMENTS).index(where))


@pytest.mark.nightly
@pytest.mark.parametrize("where", PLACEMENTS)
def test_all_views_and_writes(where):
    pairs_of(where, lambda i, j: True)


def pairs_of(where, chosen) -> None:
    shape, placements = PLACEMENTS[where]

    def rank(_):
        mesh = init_device_mesh("cpu", shape)
        for i, view in enumerate(VIEWS):
            for j, write in enumerate(WRITES):
                if chosen(i, j):
                    compare(mesh, placements, view, write, True)

    run_threads(rank, math.prod(shape))


GRADIENTS = {
    "view written": lambda x: (x[0].mul_(2), (x * x).sum())[1],
    "base written": lambda x: (lambda v: (x.mul_(3), (v * v).sum())[1])(x[0]),
    "copied into": lambda x: (lambda v: (v.copy_((v * 2).sin()), x.add_(1), (v * x[:, 1:]).sum())[2])(x[:, 1:]),
    "part of a flat one": lambda x: (lambda v: (v[3:7].mul_(2), (v.sin() * x.view(-1)).sum())[1])(x.view(-1)),
    "items": lambda x: (x.__setitem__(0, x[2] * 3), x.__setitem__((slice(None), 1), x[1, 0] * 2), (x * x).sum())[2],
    "in place": lambda x: (lambda v: (v.squeeze_(0), v.mul_(3), (x * v).sum())[2])(x[1:2]),
    "saved and changed by data": lambda x: (lambda v: (lambda y: (x.data.add_(1), y.sum())[1])(v * v))(x[0]),
}


@pytest.mark.parametrize("placement", [Shard(0), Shard(1)], ids=str)
@pytest.mark.parametrize("name", GRADIENTS)
@with_threads(2)
def test_gradients_through_written_views(rank, name, placement):
    dense = (torch.arange(24.0).view(4, 6) / 8).requires_grad_()
    x = distribute_tensor(dense.detach(), init_device_mesh("cpu", (2,)), [placement]).requires_grad_()
    values = [GRADIENTS[name](w * 1) for w in (dense, x)]
    for value in values:
        value.backward()
    torch.testing.assert_close(values[1].full_tensor(), values[0])
    torch.testing.assert_close(x.grad.full_tensor(), dense.grad)


@with_threads(2)
def test_autograd_refuses_what_it_refuses_on_one_device(rank):
    leaf = distribute_tensor(torch.ones(4, 6), init_device_mesh("cpu", (2,)), [Shard(0)]).requires_grad_()
    with pytest.raises(RuntimeError, match="view of a leaf Variable"):
        leaf[0].mul_(2)
    with pytest.raises(RuntimeError, match="output of a function that returns multiple views"):
        (leaf * 1).split(2)[0].mul_(2)
    x = leaf * 1
    v = x[0]
    y = v * v
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


BORDERS = {
    "to_local": lambda v: v.to_local(),
    "redistribute": lambda v: v.redistribute(placements=[Replicate()]).to_local(),
    "full_tensor": lambda v: v.full_tensor(),
    "deepcopy": lambda v: copy.deepcopy(v).full_tensor(),
    "flattened": lambda v: (v.__tensor_flatten__(), v._local_tensor)[1],
    "state": lambda v: v.__reduce_ex__(4)[1][0],
    "text": lambda v: torch.tensor(eval(repr(v).split("tensor(")[1].split(")")[0])),
    "item": lambda v: torch.stack([torch.tensor(v[i].item()) for i in range(6)]),
}


@pytest.mark.parametrize("name", BORDERS)
@with_threads(2)
def test_what_leaves_is_fresh(rank, name):
    x = distribute_tensor(torch.arange(24.0).view(4, 6), init_device_mesh("cpu", (2,)), [Shard(0)])
    v = x[1]
    x.mul_(2)
    assert v.placements == (Shard(0),)
    rows = [12.0, 14.0, 16.0, 18.0, 20.0, 22.0]
    assert BORDERS[name](v).tolist() in (rows, rows[3 * rank :][:3])


@with_threads(2)
def test_a_copy_of_a_view_is_no_view(rank):
    x = distribute_tensor(torch.zeros(4, 6), init_device_mesh("cpu", (2,)), [Shard(0)])
    others = [copy.deepcopy(x[0]), x[0].clone(), x[0] * 1]
    for other in others:
        other.add_(1)
    assert x.full_tensor().sum() == 0
    x.sub_(1)
    assert [other.full_tensor().tolist() for other in others] == [[1.0] * 6] * 3


@with_threads(2)
def test_optimizers_are_seen(rank):
    mesh = init_device_mesh("cpu", (2,))
    for make in (
        lambda p: torch.optim.SGD([p], lr=0.5, momentum=0.9, foreach=True),
        lambda p: torch.optim.Adam([p], lr=0.5, fused=True),
        lambda p: torch.optim.AdamW([p], lr=0.5, foreach=False),
    ):
        found = []
        for w in (torch.ones(4, 6), distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)])):
            p = torch.nn.Parameter(w)
            row, optimizer = p.detach()[0], make(p)
            (p * p).sum().backward()
            grad = p.grad[0]
            optimizer.step()
            found.append([whole(row).clone(), whole(p.detach()[0])])
            optimizer.zero_grad(set_to_none=False)
            found[-1].append(whole(grad))
        for plain, of_dtensor in zip(*found):
            torch.testing.assert_close(of_dtensor, plain)


@with_threads(2)
def test_running_statistics_that_are_looked_at(rank):
    """What an operator writes to without saying so in its schema."""
    statistics = distribute_tensor(torch.zeros(6), init_device_mesh("cpu", (2,)), [Shard(0)])
    first = statistics[:3]
    x = distribute_tensor(torch.ones(4, 6), statistics.device_mesh, [Shard(0)])
    torch.nn.functional.batch_norm(x, statistics, torch.ones_like(statistics), training=True)
    torch.testing.assert_close(first.full_tensor(), torch.full((3,), 0.1))


@with_threads(2)
def test_memory_seen_as_another_dtype(rank):
    dense = torch.arange(24.0).view(4, 6)
    x = distribute_tensor(dense, init_device_mesh("cpu", (2,)), [Shard(0)])
    for a in (dense, x):
        bits = a[0].view(torch.int32)
        a.add_(1)
        bits.add_(1)
    assert torch.equal(x.full_tensor(), dense)
    z = torch.complex(dense, dense)
    y = distribute_tensor(z, x.device_mesh, [Shard(0)])
    for a in (z, y):
        part = torch.view_as_real(a[1])[..., 0]
        turned = a.conj()
        a.mul_(2)
        part.fill_(3)
        turned.add_(1j)
    assert torch.equal(y.full_tensor(), z)


@with_threads(2)
def test_a_view_that_repeats_elements_is_not_written_to(rank):
    x = distribute_tensor(torch.arange(24.0).view(4, 6), init_device_mesh("cpu", (2,)), [Shard(0)])
    windows = x.unfold(0, 2, 1)
    for write in (lambda: windows.add_(1), lambda: windows[0].add_(1), lambda: torch.mul(windows, 2, out=windows)):
        with pytest.raises(OperatorError, match=r"several times.*write to the base, or to view.clone\(\)"):
            write()
    assert torch.equal(x.full_tensor(), torch.arange(24.0).view(4, 6))
    x.add_(1)
    assert torch.equal(windows.full_tensor(), torch.arange(1.0, 25.0).view(4, 6).unfold(0, 2, 1))


@with_threads(2)
def test_what_has_no_one_memory_is_refused(rank):
    x = distribute_tensor(torch.arange(24.0).view(4, 6), init_device_mesh("cpu", (2,)), [Shard(0)])
    with pytest.raises(OperatorError, match=r"write x\.contiguous"):
        x[:, ::2].as_strided((3, 2), (1, 6))
    dense = torch.arange(24.0).view(4, 6).t().as_strided((3, 2), (1, 6))
    assert torch.equal(x.t().as_strided((3, 2), (1, 6)).full_tensor(), dense)
    with pytest.raises(OperatorError, match="is a view of shape"):
        torch.add(x, 1, out=x.view(-1)[:0])


@with_threads(2)
def test_only_stale_copies_communicate(rank):
    x = distribute_tensor(torch.arange(24.0).view(4, 6), init_device_mesh("cpu", (2,)), [Shard(0)])
    v = x[0]

    def sent(read) -> int:
        with CountCollectives() as counted:
            read()
        return len(counted.collectives)

    assert sent(lambda: v + 1) == 0
    x.add_(1)
    assert sent(lambda: v + 1) > 0
    assert sent(lambda: v + 1) == 0
    v.mul_(2)
    assert sent(lambda: v + 1) == 0


def test_nothing_is_left_of_views_that_are_gone():
    with fake_ranks(2):
        x = distribute_tensor(torch.arange(24.0).view(4, 6), init_device_mesh("cpu", (2,)), [Shard(0)])
        before = len(copies)
        v = x[0][1:]
        x.add_(1)
        v.add_(1)
        assert len(copies) > before
        del v
        assert len(copies) == before


STEPS = st.one_of(
    st.tuples(st.just("view"), st.integers(0, 4), st.sampled_from(sorted(VIEWS.keys() - {"squeezed in place"}))),
    st.tuples(st.just("write"), st.integers(0, 4), st.sampled_from(sorted(WRITES))),
)


def carried_out(x, steps, refused: set[int]) -> list:
    """What every tensor holds in the end, and after each write the one written to and one other.

    `refused` gets the steps that are no view of what they are taken of; those in it are passed over.
    """
    tensors, read = [x], []
    for k, (what, which, name) in enumerate(steps):
        if k in refused:
            continue
        on = tensors[which % len(tensors)]
        if what == "view":
            try:
                tensors.append(VIEWS[name](on))
            except (RuntimeError, IndexError, ValueError) as error:
                if isinstance(error, OperatorError):
                    raise
                refused.add(k)
        elif on.numel():
            WRITES[name](on)
            read += [whole(on).clone(), whole(tensors[which // 2]).clone() if which // 2 < len(tensors) else 0]
    return read + [whole(t).clone() for t in tensors]


def programs(examples: int):
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(STEPS, min_size=3, max_size=7), st.sampled_from(sorted(PLACEMENTS)))
    # What one device refuses, for the strides, parts may allow.
    @example([("view", 0, "permuted"), ("view", 1, "chunk of columns"), ("view", 2, "flat")], "both")
    def check(steps, where):
        # A view with strides of a view has an offset that a DTensor does not know of.
        steps = [s for s in steps if s[2] != "strided" or s[1] == 0]
        shape, placements = PLACEMENTS[where]
        dense, refused = torch.arange(24.0).view(4, 6), set[int]()
        with torch.no_grad():
            expected = carried_out(dense.clone(), steps, refused)

        def rank(_):
            x = distribute_tensor(dense, init_device_mesh("cpu", shape), placements)
            with torch.no_grad():
                found = carried_out(x, steps, set(refused))
            assert len(found) == len(expected)
            for a, b in zip(found, expected):
                assert torch.equal(torch.as_tensor(a), torch.as_tensor(b)), (steps, where)

        run_threads(rank, math.prod(shape))

    check()


def test_programs_of_views_and_writes():
    programs(60)


@pytest.mark.nightly
def test_many_programs_of_views_and_writes():
    programs(2000)
