"""Microbatches, and the dtype in which gradients are sent, as variables of the search."""

from dataclasses import replace

import pytest
import torch

from dtensor import Plan, Shard, distribute_model, init_device_mesh, predict, search
from dtensor.prices.links import Link
from dtensor.prices.machine import Machine
from dtensor.testing import with_ranks

from .programs import alone, made, on_ranks

BESIDE = Machine(flops=1e9, half=1e9, memory=1e9, launch=0.0, overlap=0.9)
ALONE = replace(BESIDE, overlap=0.0)
WIRE = Link(alpha=1e-6, bandwidth=2e7, start=1e-6)
PLAN = {"inner.layers.*.feed_forward.w1.weight": {"tp": Shard(0)}, "inputs": {}}


def found(machine, **options):
    model, batch = made("decoder")
    return search(model, {"tp": 2}, batch, links={"tp": WIRE}, machine=machine, fixed=PLAN, **options)


def test_a_batch_is_split_where_that_hides_communication():
    beside, whole = found(BESIDE), found(BESIDE, split_batch=1)
    assert beside.options == {"split_batch": 2}
    assert not whole.options
    assert beside.prediction.seconds < 0.98 * whole.prediction.seconds
    assert "options  split_batch=2" in str(beside)
    model, batch = made("decoder")
    again = predict(model, {"tp": 2}, batch, beside, links={"tp": WIRE}, machine=BESIDE).prediction
    assert again.seconds == pytest.approx(beside.prediction.seconds)


def test_it_is_not_split_where_nothing_runs_beside():
    assert not found(ALONE).options


def test_a_batch_that_does_not_divide_is_not_split():
    model, batch = made("decoder")
    odd = tuple([x[:3] for x in batch])
    given = {"links": {"tp": WIRE}, "machine": BESIDE}
    one, two = (predict(model, {"tp": 2}, odd, Plan({"tp": 2}, options=o), **given) for o in ({}, {"split_batch": 2}))
    assert one.prediction == replace(two.prediction, took=one.prediction.took)
    plan = search(model, {"tp": 2}, odd, fixed=PLAN, split_batch=2, **given)
    assert not plan.options
    assert plan.prediction.bound > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_gradients_may_be_sent_in_a_narrower_dtype(dtype, tmp_path):
    """Half the bytes or less of the model's float64; a dtype that is not narrower changes nothing."""
    model, batch = made("decoder")
    data = {"tp": Shard(0)}
    given = {"links": {"tp": WIRE}, "machine": ALONE}
    own, sent = (
        predict(model, {"tp": 2}, batch, Plan({"tp": 2}, inputs=data, gradients=g), **given) for g in (None, dtype)
    )
    ratio = sent.prediction.beside / own.prediction.beside
    assert ratio == pytest.approx(1.0) if dtype == torch.float64 else 0.25 <= ratio < 0.3
    sent.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == sent
    assert f"gradients  sent as {str(dtype).removeprefix('torch.')}" in str(sent)


def test_the_search_allows_it_only_if_asked_to():
    assert found(ALONE).gradients is None
    plan = found(ALONE, gradients=torch.bfloat16, split_batch=1)
    assert plan.prediction.seconds <= found(ALONE).prediction.seconds


def test_gradients_are_rounded_and_otherwise_the_same():
    model, batch = made("decoder")
    plan = Plan({"tp": 2}, inputs={"tp": Shard(0)}, gradients=torch.bfloat16)
    loss, gradients = on_ranks(model, batch, plan)
    expected, grads = alone(model, batch)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients, grads, rtol=2e-2, atol=1e-3)
    assert any(not torch.equal(gradients[n], grads[n]) for n in grads)
    assert all(g.dtype == torch.float64 for g in gradients.values())


@pytest.mark.nightly
@with_ranks(2)
def test_a_plan_with_both_is_compiled(rank):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model, batch = made("decoder")
    expected, grads = alone(model, batch)
    weights = {"inner.layers.*.feed_forward.w1.weight": {"tp": Shard(0)}}
    plan = Plan({"tp": 2}, weights, gradients=torch.float32, options={"split_batch": 2})
    mine = distribute_model(model, mesh, plan, outputs={})
    torch.compiler.reset()
    run = torch.compile(mine, backend="dtensor", options={**plan.options, "inner": "aot_eager"})
    loss = run(*plan.part(batch, mesh, model))
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected)
    for name, p in mine.named_parameters():
        torch.testing.assert_close(p.grad.full_tensor(), grads[name], rtol=1e-4, atol=1e-6)


def test_a_file_with_another_dtype(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text('{"format": "dtensor plan 1", "mesh": {"tp": 2}, "gradients": "half-ish"}')
    with pytest.raises(Exception, match="'half-ish' is not a dtype, such as 'bfloat16'"):
        Plan.load(path)
