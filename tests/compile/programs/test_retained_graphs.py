"""`backward(retain_graph=True)` of compiled functions: the tensors saved for the backward outlast it."""

import pytest
import torch

from dtensor import Shard, distribute_tensor, init_device_mesh
from dtensor.testing import with_ranks


def wave(x):
    return (x @ x.t()).sin().exp()


ORDERS = {"kept at first": (True, True, False), "kept later": (False, True, True, False)}
"""Whether the graph is kept, for one backward after the other; where it is not, the forward runs again."""


def gradients(f, x, order):
    """The gradients of one backward after the other, each with another weight."""
    found, out = [], None
    for k, kept in enumerate(order):
        out = f(x).sum() * 1.0 if out is None else out
        found.append(torch.autograd.grad(out * (k + 1.0), x, retain_graph=kept)[0])
        out = out if kept else None
    return [getattr(g, "full_tensor", lambda g=g: g)() for g in found]


def check(mesh, f, *, unsharded=True, **how):
    plain = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    for order in ORDERS.values():
        want = gradients(wave, plain.clone().requires_grad_(), order)
        for x in (distribute_tensor(plain, mesh, [Shard(0)]), plain.clone())[: 1 + unsharded]:
            torch._dynamo.reset()
            got = gradients(torch.compile(f, **how), x.requires_grad_(), order)
            torch.testing.assert_close(got, want)


@with_ranks(2)
def test_a_graph_is_kept(rank):
    mesh = init_device_mesh("cpu", (2,))
    check(mesh, wave, backend="aot_eager")
    check(mesh, wave, backend="dtensor", options={"inner": "aot_eager"})


@pytest.mark.parametrize("unsharded", [False, pytest.param(True, marks=pytest.mark.nightly)])
@with_ranks(2)
def test_what_the_code_may_write_to_is_copied(rank, unsharded):
    """Inductor's code reuses the memory of what is saved; the first backward decides nothing about the next."""
    check(init_device_mesh("cpu", (2,)), wave, unsharded=unsharded)


@pytest.mark.nightly
@with_ranks(2)
def test_functions_that_save_more(rank):
    """Random chains of functions, on sharded and on plain tensors, with some of the backwards kept."""
    mesh = init_device_mesh("cpu", (2,))
    steps = [
        torch.sin,
        torch.exp,
        torch.tanh,
        torch.relu,
        torch.sigmoid,
        lambda x: x * x.sum(),
        lambda x: x @ x.t() @ x,
    ]
    for seed in range(24):
        made = torch.Generator().manual_seed(seed)
        chain = [steps[k] for k in torch.randint(len(steps), (4,), generator=made)]
        order = [*(torch.rand(4, generator=made) < 0.6).tolist(), False]
        x = torch.rand(8, 6, generator=made) * 0.1

        def f(x, chain=chain):
            for step in chain:
                x = step(x)
            return x

        want = gradients(f, x.clone().requires_grad_(), order)
        for y, backend in ((x.clone(), "inductor"), (distribute_tensor(x, mesh, [Shard(0)]), "dtensor")):
            torch._dynamo.reset()
            got = gradients(torch.compile(f, backend=backend), y.requires_grad_(), order)
            torch.testing.assert_close(got, want)
