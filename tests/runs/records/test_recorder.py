"""What is recorded of a step, and that recording changes nothing of it."""

import copy

import numpy as np
import pytest
import torch
import torch.distributed.tensor as theirs
from torch import nn

import dtensor
from dtensor import Replicate, Shard, distribute_tensor, init_device_mesh
from dtensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from dtensor.runs.comparing.values import load
from dtensor.runs.records import fingerprint as fp
from dtensor.runs.records import recorder as recording
from dtensor.runs.records.recording import record_if_asked
from dtensor.testing import run_ranks, run_threads


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, 6))


def train(of, steps=2, **optimizer):
    """Losses, gradients and parameters of some steps."""
    used = torch.optim.AdamW(of.parameters(), lr=0.1, **optimizer)
    seen = []
    torch.manual_seed(1)
    for _ in range(steps):
        loss = of(torch.linspace(-1, 1, 24).view(4, 6)).square().mean()
        loss.backward()
        used.step()
        seen += [loss.detach(), *[p.grad for p in of.parameters()], *[p.detach().clone() for p in of.parameters()]]
        used.zero_grad()
    return [x.to_local() if isinstance(x, dtensor.DTensor) else x for x in seen]


def values(folder):
    return list(load(folder).values.values())


def total(value):
    """The fingerprint of the global tensor."""
    return value.copies[0].vector


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
def test_nothing_differs_bit_for_bit(options, tmp_path):
    expected = train(model(), **options)
    with dtensor.record(tmp_path):
        found = train(model(), **options)
    assert all(a.equal(b) for a, b in zip(found, expected, strict=True))
    assert load(tmp_path).steps == 2


def test_nothing_differs_on_two_ranks(tmp_path):
    whole = model()  # here, as threads share the generator of random numbers

    def on_rank(rank, folder):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        mine = nn.Sequential(*[m for k, m in enumerate(copy.deepcopy(whole)) if k in (0, 2, 4)])
        mine = parallelize_module(mine, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        if folder is None:
            return train(mine)
        with dtensor.record(folder):
            return train(mine)

    expected, found = run_threads(on_rank, 2, None), run_threads(on_rank, 2, tmp_path)
    for a, b in zip(found, expected):
        assert all(x.equal(y) for x, y in zip(a, b, strict=True))


def test_parameters_inputs_and_results(tmp_path):
    layer, x = nn.Linear(6, 8), torch.linspace(-1, 1, 24).view(4, 6)
    with dtensor.record(tmp_path):
        y = layer(x)
    found = {v.op: v for v in values(tmp_path)}
    assert {v.module for v in values(tmp_path) if v.op == "parameter"} == {"weight", "bias"}
    given, result = found["input"], found["addmm"]
    np.testing.assert_allclose(total(given), fp.fingerprint(x, x.shape, (0, 0)).numpy())
    np.testing.assert_allclose(total(result), fp.fingerprint(y.detach(), y.shape, (0, 0)).numpy())
    assert {key[3] for key in result.inputs} == {"parameter", "input"}
    assert (result.dtype, result.first["g"], result.spec) == ("float32", [4, 8], None)


def test_in_place_operators_make_new_values(tmp_path):
    x = torch.ones(3)
    with dtensor.record(tmp_path):
        x.add_(1)
        x.mul_(3)
        y = x[1:] + 1
    added, doubled, last = [v for v in values(tmp_path) if v.kind == "op"]
    assert (added.op, doubled.op, last.op) == ("add", "mul", "add")
    assert [total(v)[fp.SQUARES] for v in (added, doubled, last)] == [12, 108, 98]
    assert (doubled.inputs, last.inputs) == ((added.key,), (doubled.key,))
    assert y.tolist() == [7, 7]


def test_what_is_written_through_a_view(tmp_path):
    x = torch.zeros(4)
    with dtensor.record(tmp_path):
        x[1:3].copy_(torch.ones(2))
        (x * 1).sum()
    (summed,) = [v for v in values(tmp_path) if v.op == "sum"]
    assert total(summed)[fp.SQUARES] == 4


def test_views_and_clones_hold_the_value_of_their_base(tmp_path):
    with dtensor.record(tmp_path):
        x = torch.ones(4, 3) * 2
        y = x.t().reshape(12).clone() + 1
    made, last = [v for v in values(tmp_path) if v.op in ("mul", "add")]
    assert last.inputs == (made.key,)
    assert y.sum() == 36


def test_integers_bools_and_what_is_no_tensor_of_numbers(tmp_path):
    with dtensor.record(tmp_path):
        _ = torch.arange(5) > 2
        torch.ones(3).to_sparse()
        torch.empty(3)
    by_op = {v.op: v for v in values(tmp_path)}
    assert (by_op["gt"].dtype, by_op["gt"].exact, by_op["arange"].dtype) == ("bool", True, "int64")
    assert "empty" not in by_op


def test_each_parameter_of_a_foreach_optimizer_has_its_own_values(tmp_path):
    mine = model()
    with dtensor.record(tmp_path):
        train(mine, steps=1, foreach=True)
    of = [v for v in values(tmp_path) if v.phase == "optimizer" and v.module == "4.weight" and v.kind == "op"]
    assert {"lerp", "addcmul", "sqrt", "addcdiv"} <= {v.op for v in of}
    (step,) = [v for v in of if v.op == "addcdiv"]
    assert {key[2] for key in step.inputs} == {"4.weight"}
    (updated,) = [v for v in values(tmp_path) if v.op == "updated" and v.module == "4.weight"]
    expected = fp.fingerprint(mine[4].weight.detach(), (6, 8), (0, 0)).numpy()
    np.testing.assert_allclose(total(updated), expected)


def test_placements_and_redistributions(tmp_path):
    x = torch.arange(15.0).view(5, 3)

    def on_rank(rank):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        with dtensor.record(tmp_path):
            mine = distribute_tensor(x, mesh, [Shard(0)])  # three rows and two
            mine.sin().sum().redistribute(mesh, [Replicate()])

    run_threads(on_rank, 2)
    sine, summed, moved = [v for v in values(tmp_path) if v.op in ("sin", "sum") or v.kind == "move"]
    assert [str(v.spec) for v in (sine, summed, moved)] == ["tp: S(0)", "tp: P(sum)", "tp: R"]
    assert [[box for r in (0, 1) for box in sine.spec.box(r)]] == [[(0, 3), (0, 3), (3, 5), (0, 3)]]
    np.testing.assert_allclose(total(sine), fp.fingerprint(x.sin(), (5, 3), (0, 0)).numpy(), rtol=1e-6, atol=1e-6)
    assert moved.inputs == (summed.key,)
    assert [c.ranks for c in moved.copies] == [(0,), (1,)]
    for copy_ in (*summed.copies, *moved.copies):
        assert copy_.vector[fp.TOTAL] == pytest.approx(x.sin().sum().item(), rel=1e-5)


def with_theirs(rank, folder):
    mesh = theirs.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = theirs.distribute_tensor(torch.arange(12.0).view(4, 3), mesh, [theirs.Shard(0)])
    w = theirs.distribute_tensor(torch.ones(3, 2), mesh, [theirs.Replicate()])
    with dtensor.record(folder):
        (x @ w).sum(0)


def test_tensors_of_torch_distributed(tmp_path):
    run_ranks(with_theirs, 2, str(tmp_path))
    product, summed = [v for v in values(tmp_path) if v.op in ("mm", "sum")]
    assert [str(v.spec) for v in (product, summed)] == ["tp: S(0)", "tp: P(sum)"]
    expected = torch.arange(12.0).view(4, 3) @ torch.ones(3, 2)
    np.testing.assert_allclose(total(product), fp.fingerprint(expected, (4, 2), (0, 0)).numpy())
    np.testing.assert_allclose(total(summed)[fp.TOTAL], fp.fingerprint(expected.sum(0), (2,), (0,))[fp.TOTAL].item())


def test_steps_end_the_record(tmp_path):
    with dtensor.record(tmp_path, steps=1) as recorder:
        train(model(), steps=3)
        assert not recorder.open
    run = load(tmp_path)
    assert (run.steps, {v.step for v in run.values.values()}) == (1, {0})


def test_steps_without_an_optimizer(tmp_path):
    with dtensor.record(tmp_path, steps=2) as recorder:
        for _ in range(4):
            torch.ones(2).sin()
            recorder.step()
    assert [v.step for v in values(tmp_path) if v.op == "sin"] == [0, 1]


def test_a_training_goes_on_after_the_record(tmp_path):
    mine, expected = model(), train(model(), steps=4)
    with dtensor.record(tmp_path, steps=2):
        found = train(mine, steps=4)
    assert all(a.equal(b) for a, b in zip(found, expected, strict=True))


def test_after_the_record_its_hooks_break_no_graph():
    """The hooks of all optimizers stay."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))])

    def step(x):
        recording._before_optimizer(optimizer, (), {})
        recording._after_optimizer(optimizer, (), {})
        return x + 1

    assert torch.compile(step, backend="eager", fullgraph=True)(torch.ones(2)).eq(2).all()


def test_two_recorders_one_after_the_other(tmp_path):
    mine = model()
    with dtensor.record(tmp_path / "first"):
        train(copy.deepcopy(mine), steps=1)
    train(copy.deepcopy(mine), steps=1)
    with dtensor.record(tmp_path / "second"):
        train(copy.deepcopy(mine), steps=1)
    first, second = (load(tmp_path / name) for name in ("first", "second"))
    assert list(first.values) == list(second.values)
    for key, value in first.values.items():
        np.testing.assert_array_equal(total(value), total(second.values[key]))
    assert not recording.is_recording()


def test_one_recorder_is_entered_once_at_a_time(tmp_path):
    with dtensor.record(tmp_path) as recorder:
        with pytest.raises(RuntimeError, match="this recorder is in use; make another one"):
            recorder.__enter__()
        torch.ones(2).sin()
    assert [v.op for v in values(tmp_path) if v.op == "sin"] == ["sin"]


def test_whole_values_of_a_pattern(tmp_path):
    layer = nn.Sequential(nn.Linear(3, 2), nn.Tanh()).to(torch.bfloat16)
    with dtensor.record(tmp_path, values="forward/1/*"):
        y = layer(torch.ones(2, 3, dtype=torch.bfloat16))
    kept = [v for v in values(tmp_path) if v.first.get("v")]
    assert [v.op for v in kept] == ["tanh"]
    assert np.load(tmp_path / kept[0].first["v"]).tolist() == y.float().tolist()
    assert len(list(tmp_path.glob("*.npy"))) == 1


@pytest.mark.parametrize(
    ("folder", "given", "error", "words"),
    [
        ("", {}, TypeError, "folder is the path of a folder, got ''"),
        (None, {}, TypeError, "write dtensor.record"),
        ("x", {"steps": 1.0}, TypeError, "steps is a number of optimizer steps or None, got 1.0"),
        ("x", {"steps": True}, TypeError, "got True"),
        ("x", {"steps": 0}, ValueError, "steps is 0; write 1 or more"),
    ],
)
def test_wrong_arguments(folder, given, error, words):
    with pytest.raises(error, match=words):
        dtensor.record(folder, **given)


def test_a_wrong_number_of_steps_in_the_environment(monkeypatch):
    monkeypatch.setenv("DTENSOR_RECORD", "folder")
    monkeypatch.setenv("DTENSOR_RECORD_STEPS", "two")
    with pytest.raises(ValueError, match="DTENSOR_RECORD_STEPS is 'two'; write a number of steps"):
        record_if_asked()


def test_an_error_of_the_program_is_noted(tmp_path):
    def fails():
        with dtensor.record(tmp_path):
            torch.ones(2).sin()
            return 1 / 0

    with pytest.raises(ZeroDivisionError):
        fails()
    assert load(tmp_path).failed == {0: "ZeroDivisionError: division by zero"}


def test_an_earlier_record_is_not_written_over(tmp_path, monkeypatch):
    with dtensor.record(tmp_path / "one"):
        torch.ones(2).add(1)
    before = (tmp_path / "one" / "rank00000.jsonl").read_bytes()
    said = r"one holds the files of an earlier run \(rank00000.jsonl\), which are not written over; name another folder"
    with pytest.raises(dtensor.RecordError, match=said):
        dtensor.record(tmp_path / "one").__enter__()
    assert (tmp_path / "one" / "rank00000.jsonl").read_bytes() == before
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # torchrun started the program again: the record is its own
    with dtensor.record(tmp_path / "one"):
        torch.ones(2).add(1)
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")

    def on_rank(rank):
        """The same on all ranks, and of more ranks than there are now."""
        with pytest.raises(dtensor.RecordError, match=f"rank0000{rank}.jsonl"):
            dtensor.record(tmp_path / "two").__enter__()

    def recorded(rank):
        with dtensor.record(tmp_path / "two"):
            torch.ones(2).add(1)

    run_threads(recorded, 2)
    run_threads(on_rank, 2)
    with pytest.raises(dtensor.RecordError, match=r"rank00000\.jsonl"):
        dtensor.record(tmp_path / "two").__enter__()
    (tmp_path / "two" / "rank00000.jsonl").unlink()
    with pytest.raises(dtensor.RecordError, match=r"rank00001\.jsonl"):
        dtensor.record(tmp_path / "two").__enter__()
