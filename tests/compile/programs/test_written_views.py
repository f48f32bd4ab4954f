"""Views and writes in compiled functions and around them: one device's values, or an error that says what to write."""

import functools
import itertools
import warnings

import pytest
import torch

from dtensor import DTensor, Replicate, Shard, ShardingError, distribute_tensor, init_device_mesh
from dtensor.testing import with_ranks

VIEWS = {"row": lambda x: x[0], "columns": lambda x: x[:, 1:], "flat": lambda x: x.view(-1), "turned": lambda x: x.t()}
BACKENDS = ({"backend": "aot_eager"}, {"backend": "dtensor", "options": {"inner": "aot_eager"}})


def base_inside(view, x, run):
    def f(x):
        v = view(x)
        x.add_(1)
        return v * 2

    return [run(f)(x), x]


def both_inside(view, x, run):
    def f(x):
        y = x * 2
        v = view(y)
        y.mul_(2)
        v.add_(1)
        w = v[1:]
        y.add_(1)
        w.mul_(3)
        return v * 2, y * 1, w * 1

    return [*run(f)(x), x]


def view_outside(view, x, run):
    v = view(x)
    return [run(lambda x: x.add_(1) * 2)(x), x, v]


def stale_input(view, x, run):
    v = view(x)
    x.add_(1)
    return [run(lambda v: v * 2)(v), v]


def stale_output(view, x, run):
    def f(x):
        y = x * 2
        v = view(y)
        w = v[1:]
        y.mul_(x)
        w.add_(1)
        v.mul_(3)
        return w

    return [*with_gradient(run(f), x)]


def written_part_of_a_view(view, x, run):
    """A convolution in one dimension is a view of one in two."""

    def f(x):
        y = torch.conv1d(view(x).reshape(1, -1), torch.ones(2, 1, 2), padding=1)
        y.narrow(0, 0, 1).mul_(2)
        return y

    return [*with_gradient(run(f), x)]


def with_gradient(f, x):
    x = x.requires_grad_()
    out = f(x)
    return out, *torch.autograd.grad(out.sum(), x)


PROGRAMS = (base_inside, both_inside, view_outside, stale_input, stale_output, written_part_of_a_view)


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


@pytest.mark.parametrize("every_pair", [False, pytest.param(True, marks=pytest.mark.nightly)])
@with_ranks(2)
def test_values(rank, every_pair):
    """By day each program, of one view; each view and each backend occurs."""
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (2,))
    dense = torch.arange(24.0).view(4, 6)
    for i, program in enumerate(PROGRAMS):
        for j, (name, view) in enumerate(VIEWS.items()):
            if not every_pair and j != i * len(VIEWS) // len(PROGRAMS):
                continue
            torch.compiler.reset()
            options = BACKENDS[(i + j) % 2]
            placement = [Shard(1)] if name in ("columns", "flat") else [Shard(0)]
            expected = program(view, dense.clone(), lambda f: f)
            found = program(
                view, distribute_tensor(dense, mesh, placement), functools.partial(torch.compile, **options)
            )
            for a, b in zip(found, expected, strict=True):
                assert torch.equal(whole(a.detach()), b), (program.__name__, name, options)


def base_and_view(x, v):
    x.add_(1)
    return v * 2


@pytest.mark.parametrize("name", ["turned", "row"])  # first where no view of this process was a copy
def test_inputs_that_share_memory_are_not_written_to(fake_mesh, name):
    x = distribute_tensor(torch.arange(24.0).view(4, 6), fake_mesh(2), [Shard(0)])
    with pytest.raises(ShardingError, match="shares memory with another input"):
        torch.compile(base_and_view, backend="aot_eager")(x, VIEWS[name](x))


def test_a_copy_from_outside_is_not_written_to(fake_mesh):
    x = distribute_tensor(torch.arange(24.0).view(4, 6), fake_mesh(2), [Shard(0)])
    with pytest.raises(Exception, match="pass the base and make the view inside"):
        torch.compile(lambda v: v.add_(1) * 2, backend="aot_eager")(x[0])


READ_BEFORE = {
    "a product": lambda x, w: (x * (w * w)).sum(),
    "a norm": lambda x, w: (x * (w / w.norm())).sum(),
    "a similarity": lambda x, w: torch.nn.functional.cosine_similarity(x, w, dim=0),
}
"""What a backward makes again of an input, or not, as torch's partitioner likes."""


@pytest.mark.parametrize(
    ("inner", "every"),
    [("aot_eager", 3), *[pytest.param(inner, 1, marks=pytest.mark.nightly) for inner in ("aot_eager", "inductor")]],
)
@with_ranks(2)
def test_a_backward_reads_what_was_there_before_the_write(rank, inner, every):
    """By day a third of the cases, in which each of the parts of a case occurs."""
    mesh = init_device_mesh("cpu", (2,))
    values = torch.linspace(-1, 2, 8, dtype=torch.float64), torch.linspace(0.5, 3, 8, dtype=torch.float64)
    parts, placements = (lambda w: w, lambda w: w.select(0, 1)), (Replicate(), Shard(0))
    for name, part, placement in list(itertools.product(READ_BEFORE, parts, placements))[::every]:

        def f(x, w, read=READ_BEFORE[name], part=part):
            y = read(x, w)
            part(w).sin_()
            return y

        x, w = values[0].clone().requires_grad_(), values[1].clone()
        f(x, w).backward()
        torch.compiler.reset()
        a, b = (distribute_tensor(v.clone(), mesh, [placement]) for v in values)
        a.requires_grad_()
        torch.compile(f, backend="dtensor", fullgraph=True, options={"inner": inner})(a, b).backward()
        torch.testing.assert_close(a.grad.full_tensor(), x.grad, msg=name)
        torch.testing.assert_close(b.full_tensor(), w, msg=name)


def of_an_input(x, run):
    return run(lambda x: (x[0], x * 2))(x)[0], x


def of_another_result(x, run):
    def f(x):
        y = x * 2
        return y[0], y

    return run(f)(x)


def of_what_is_gone(x, run):
    def f(x):
        y = x * 2
        return y[0], y[:2]

    return run(f)(x)


def around_a_graph_break(x, run):
    def f(x):
        v = x[0]
        torch._dynamo.graph_break()
        return v, x

    return run(f, False)(x)


RETURNED = {f.__name__: f for f in (of_an_input, of_another_result, of_what_is_gone, around_a_graph_break)}


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", RETURNED)
def test_a_copy_that_a_compiled_function_returned(fake_mesh, name, inner):
    """It is read as long as it is right; then that is an error, as it is to write to it."""
    mesh = fake_mesh(2)

    def run(f, fullgraph=True):
        return torch.compile(f, backend="dtensor", fullgraph=fullgraph, options={"inner": inner})

    def made():
        torch.compiler.reset()
        return RETURNED[name](distribute_tensor(torch.arange(12.0).view(4, 3), mesh, [Shard(0)]), run)

    view, other = made()
    assert view.to_local().shape == (view + 1).to_local().shape
    if name != "of_what_is_gone":
        other.add_(1)
        for read in (lambda: view + 1, view.to_local, view.full_tensor, lambda: repr(view), lambda: view[0]):
            with pytest.raises(ShardingError, match=r"of shape \[3\] is a view that a compiled function returned"):
                read()
        view, other = made()
        run(lambda x: x.mul_(2))(other)
        with pytest.raises(ShardingError, match="make the view again"):
            view + 1
    view, _ = made()
    with pytest.raises(ShardingError, match=r"aten.mul_.Tensor would write to a view of shape \[3\]"):
        view.mul_(2)
    view.clone().mul_(2)


def test_what_a_compiled_function_returns_alone_is_written_to(fake_mesh):
    """What a copy is a view of is gone: nobody would see the difference."""
    x = distribute_tensor(torch.arange(12.0).view(4, 3), fake_mesh(2), [Shard(0)])
    out = torch.compile(lambda x: (x * 2)[0], backend="dtensor", options={"inner": "aot_eager"})(x)
    out.mul_(2)
    x.add_(1)
    assert (out + 1).shape == (3,)
