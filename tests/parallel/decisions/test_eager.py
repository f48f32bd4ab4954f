"""Eager mode follows what is decided for a batch: it sends what compiled code does before passes, and its values."""

import copy
import gc
import warnings
from collections import Counter

import pytest
import torch
from torch import nn

from dtensor import Shard, distribute_model, init_device_mesh
from dtensor.compile import statistics
from dtensor.dispatch.whole_graph import Copies, Following, runs
from dtensor.errors import PlacementError
from dtensor.mesh import provenance
from dtensor.parallel import fully_shard
from dtensor.parallel.decisions import frames
from dtensor.testing import CountCollectives, fake_ranks, run_ranks

from .test_decisions import AOT, PLAN, Checkpointed, batch, compared, decoder

WIDTH = 256
X = batch(8, 128, WIDTH)


@pytest.fixture
def mesh():
    gc.freeze()  # of half a million living objects those that a test makes are looked at
    with fake_ranks(2):
        yield init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    gc.collect()


def sharded(mesh, model: nn.Module | None = None, **options) -> nn.Module:
    return distribute_model(model or decoder(2, WIDTH), mesh, PLAN, check_inputs=False, outputs={}, **options)


def sent(run, x: torch.Tensor = X) -> tuple[Counter, Counter]:
    """What a step sends forward and backward, by operator."""
    with CountCollectives() as forward:
        out = run(x)
    with CountCollectives() as backward:
        out.square().mean().backward()
    return Counter(c.op for c in forward.collectives), Counter(c.op for c in backward.collectives)


def compiled(model: nn.Module, x: torch.Tensor = X) -> Counter:
    """What a compiled step sends if nothing of ours improves the graph; AOTAutograd makes one of equal nodes."""
    torch.compiler.reset()
    with statistics() as seen:
        torch.compile(model, backend="dtensor", options=AOT | {"passes": []})(x).square().mean().backward()
    return Counter(c.op for record in seen.records if record.direction != "joint" for c in record.collectives)


def test_eager_sends_what_compiled_sends_before_the_passes(mesh):
    model = sharded(mesh, batch=X)
    decided = sum(sent(model), Counter())
    assert decided == compiled(model)
    assert decided.total() < sum(sent(sharded(mesh)), Counter()).total()


def test_a_forward_that_runs_again_in_the_backward_follows_too(mesh, monkeypatch):
    missed = []
    own = Following.take

    def take(self, func):
        own(self, func)
        missed.extend(self.missed)

    monkeypatch.setattr(Following, "take", take)
    models = (sharded(mesh, Checkpointed(2, WIDTH), **given) for given in ({"batch": X}, {}))
    decided, alone = (sum(sent(model), Counter()) for model in models)
    assert decided.total() < alone.total()
    assert not missed


def test_several_forwards_and_each_backward_follow(mesh):
    """Whatever comes in between, in whatever order, and again with the graph kept."""
    model = sharded(mesh, batch=X)
    forward, backward = sent(model)
    outs = []
    for x in (X, X[:4] * 2, X[:6]):
        with CountCollectives() as seen:
            outs.append(model(x).square().mean())
        assert Counter(c.op for c in seen.collectives) == forward
    for out in (outs[1], outs[2], outs[2], outs[0]):
        with CountCollectives() as seen:
            out.backward(retain_graph=True)
        # What only the last forward has moved is there for its first backward; others move it again.
        assert Counter(c.op for c in seen.collectives) >= backward
    with torch.no_grad(), CountCollectives() as seen:
        model(X)
    assert seen.collectives


def test_another_model_does_not_follow(mesh):
    alone = sent(sharded(mesh))
    model = sharded(mesh, batch=X)
    sent(model)
    assert sent(sharded(mesh)) == alone


def values(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = distribute_model(decoder(1), mesh, PLAN, outputs={}, batch=batch(4, 8))
        compared(model, model, [(4, 8), (5, 7)])
        twin = copy.deepcopy(model)  # which has decisions of its own
        compared(twin, twin, [(5, 7)])
        torch.manual_seed(0)
        model = distribute_model(Checkpointed(1, 16), mesh, PLAN, outputs={}, batch=batch(4, 8))
        compared(model, model, [(4, 8), (5, 7)])


def test_values_on_two_ranks():
    run_ranks(values, 2, timeout=300)


class Noisy(nn.Module):
    """A forward with a state: random numbers, and statistics of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o, self.norm = nn.Linear(16, 16), nn.Linear(16, 16), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(nn.functional.dropout(self.q(x), 0.5, self.training))
        return self.o(y + torch.rand(16))


def states(rank: int) -> None:
    """Recording draws no numbers and writes to no buffer; each kind of call has decisions of its own."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = []
        for given in ({}, {"batch": batch(4, 8)}):
            torch.manual_seed(0)
            plan = {"q.weight": {"tp": Shard(0)}, "o.weight": {"tp": Shard(1)}}
            model = distribute_model(Noisy(), mesh, plan, outputs={}, **given)
            outs = []
            for training, cast, gradients in (
                (True, False, True),
                (False, False, True),
                (True, True, True),
                (False, False, False),
            ):
                model.train(training)
                with torch.autocast("cpu", torch.bfloat16, enabled=cast), torch.set_grad_enabled(gradients):
                    outs.append(model(batch(4, 8)).float())
                    if gradients:
                        outs[-1].sum().backward()
            found.append([*(out.detach() for out in outs), *(b.full_tensor() for b in model.buffers())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)


def test_recording_leaves_nothing_behind():
    run_ranks(states, 2, timeout=300)


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        torch._dynamo.graph_break()
        return self.b(y)


def test_compiled_code_with_graph_breaks_does_not_follow_them(mesh):
    """Dynamo leaves the frame around a graph break, and compiles those inside."""
    x = batch(4, 8, 16)
    model = distribute_model(Broken(), mesh, {"a.weight": {"tp": Shard(0)}}, check_inputs=False, batch=x)
    torch.compiler.reset()
    torch.compile(model, backend="dtensor", options=AOT)(x).sum().backward()
    assert not vars(model)["_dtensor_view"].decisions


class Turns(nn.Module):
    """A forward that is another one each time."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.turn = nn.Linear(16, 16), nn.Linear(16, 16), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.turn += 1
        return self.b(self.a(x)) if self.turn % 2 else self.a(x).tanh().exp().sin().cos()


def test_a_program_that_changes_is_said_once(mesh):
    x = batch(4, 8, 16)
    torch.manual_seed(0)
    model = distribute_model(Turns(), mesh, {"a.weight": {"tp": Shard(0)}}, check_inputs=False, batch=x)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(4):
            model(x).sum().backward()
    (one,) = said
    assert "not those that were recorded, from aten." in str(one.message)


def test_what_is_fully_sharded_is_said():
    with fake_ranks(4):
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = distribute_model(decoder(1), both["tp"], PLAN, outputs={}, check_inputs=False, batch=batch(4, 8))
        fully_shard(model, mesh=both["dp"])
        with pytest.warns(UserWarning, match="is fully sharded"):
            model(batch(4, 8))


def test_a_name_that_forward_does_not_take_is_refused(mesh):
    model = decoder(1)
    with pytest.raises(PlacementError, match=r"batch: forward takes no 'y'; write one of its arguments, 'x'$"):
        sharded(mesh, model, batch={"y": X})
    assert all(type(p) is nn.Parameter for p in model.parameters())


def test_decisions_that_fail_are_said_and_left_out(mesh, monkeypatch):
    def fail(recording, folder):
        raise ArithmeticError("no layouts today")

    monkeypatch.setattr(frames, "decide", fail)
    model = sharded(mesh, batch=X)
    with pytest.warns(UserWarning, match="no layouts today"):
        found = sent(model)
    assert found == sent(sharded(mesh))


def test_nothing_is_left_of_a_model_that_is_gone(mesh):
    before = provenance.looked_up
    model = sharded(mesh, batch=X)
    sent(model)
    assert provenance.looked_up == before + 1
    del model
    gc.collect()
    assert provenance.looked_up == before
    assert not any(ran.copies._kept for ran in next(iter(runs.by_thread.values())))


def test_a_copy_is_kept_while_its_tensor_is_alive_and_neither_is_written_to():
    copies = Copies()

    def times(local: torch.Tensor, by: int) -> torch.Tensor:
        return local * by

    x = torch.ones(4)
    first = copies.once(times, x, (2,))
    assert copies.once(times, x.view(4), (2,)) is first
    assert copies.once(times, x, (3,)).tolist() == [3.0] * 4
    assert copies.once(times, x.view(2, 2), (2,)).shape == (2, 2)
    x.add_(1)
    second = copies.once(times, x, (2,))
    assert second.tolist() == [4.0] * 4
    second.add_(1)
    assert copies.once(times, x, (2,)).tolist() == [4.0] * 4
    held = copies.once(times, x, (2,))
    view = copies.once_for_view(times, x, (2,))
    assert view.equal(held)
    assert view.data_ptr() != held.data_ptr()
    assert copies.once(torch.Tensor.view, x, (4,)) is not copies.once(torch.Tensor.view, x, (4,))
    del x
    copies.once(times, torch.ones(2), (2,))
    assert len(copies._kept) == 1
