"""What to write against an exposed collective: each rule, where it must not fire, and the reason where none does."""

from dataclasses import asdict

import pytest
import torch
from torch import nn

import dtensor.compile
from dtensor.compile.backends import alternatives
from dtensor.compile.estimates.timeline import replayed
from dtensor.compile.reports.reading import read
from dtensor.compile.reports.remedies import Remedy, with_remedies
from dtensor.compile.reports.summary import most_exposed, remedy, summary
from dtensor.parallel import ColwiseParallel, MixedPrecisionPolicy, RowwiseParallel, fully_shard, parallelize_module
from dtensor.prices.links import DEFAULT

C = {
    "op": "all_reduce", "direction": "forward", "dtype": "float32", "shapes": [[64, 32]], "ranks": [0, 1], "asked": [0],
    "move": "P->R", "bytes": 8192, "sent": 8192, "seconds": 10e-6, "fixed": 2e-6, "exposed": 10e-6, "parameter": False,
    "makers": ["mm"], "readers": ["add"], "code": "return self.w2(x)", "link": asdict(DEFAULT),
}  # fmt: skip
"""A collective of a manifest."""


def of(manifest):
    """The remedies of each collective of a manifest."""
    return [[Remedy(**r) for r in c["remedies"]] for c in with_remedies(manifest)]


def alone(c):
    """The manifest of a graph that computes for a millisecond and then sends `c`."""
    graph = {"order": [0, ~0], "gaps": [1e-3, c["seconds"] - c["exposed"]], "taken": [0.0], "peak_bytes": 100}
    graph |= {"computing": 2e-3, "seconds": 2e-3 + c["exposed"]}
    return {"graphs": {c["direction"]: graph}, "collectives": [c]}


def said(c, **others):
    (found,) = of(alone(c) | others)
    return found


def only(c):
    (found,) = said(c)
    return found


def test_half_the_bytes():
    """Half of what depends on the bytes is saved, and no more than is exposed."""
    assert only(C).write.startswith("with torch.autocast(")
    assert only(C).saves == pytest.approx(4e-6)
    assert only(C | {"exposed": 1e-6}).saves == pytest.approx(1e-6)
    for other in ({"direction": "backward"}, {"makers": ["mm", "embedding"]}):
        assert only(C | other).write == ""
    asked = only(C | {"code": "x = x.redistribute(placements=[Replicate()])"})
    assert asked.write == "redistribute(..., forward_dtype=torch.bfloat16)"
    gathered = C | {"op": "all_gather", "move": "S(0)->R", "parameter": True}
    quarter, half = said(gathered)
    assert "MixedPrecisionPolicy(gather_dtype=torch.float8_e4m3fn)" in quarter.write
    assert "MixedPrecisionPolicy(param_dtype=torch.bfloat16)" in half.write
    assert (quarter.saves, half.saves) == (pytest.approx(6e-6), pytest.approx(4e-6))


def test_gradients():
    gradient = C | {"op": "reduce_scatter", "move": "P(avg)->S(0)", "direction": "backward", "readers": ["output"]}
    later, quarter, half = said(gradient)
    assert "set_requires_gradient_sync(False)" in later.write
    assert ("reduce_dtype=torch.float8_e4m3fn" in quarter.write, quarter.saves) == (True, pytest.approx(6e-6))
    assert later.saves == pytest.approx(10e-6)
    assert said(gradient | {"asked": [0, 1, 2]})[0].saves == pytest.approx(6e-6)  # three starts instead of one
    assert ("reduce_dtype=torch.bfloat16" in half.write, half.saves) == (True, pytest.approx(4e-6))
    assert only(gradient | {"readers": ["mm"]}).write == ""  # what a backward computes with is no gradient yet


def test_a_loss_on_sharded_logits():
    """Three small all-reduces in place of the gather; not where those cost more, and only in front of a loss."""
    logits = C | {"op": "all_gather", "move": "S(1)->R", "shapes": [[2048, 64]], "readers": ["_log_softmax"]}
    logits |= {"bytes": 2048 * 64 * 4, "seconds": 1e-3, "exposed": 1e-3}
    first, _ = said(logits)
    assert "loss_parallel()" in first.write
    small = DEFAULT.start + 2 * DEFAULT.alpha + 4 * 64 / DEFAULT.bandwidth
    assert first.saves == pytest.approx(1e-3 - 3 * small)
    for other in ({"readers": ["mm"]}, {"move": "S(0)->R"}, {"seconds": 3 * small, "exposed": 3 * small}):
        assert not any("loss_parallel" in r.write for r in said(logits | other)), other


def test_a_shorter_collective_saves_what_another_one_waits_for():
    """Two that queue: the first is never waited for long, but the second is exposed less once the first is shorter."""
    first = C | {"op": "all_gather", "move": "S(0)->R", "parameter": True, "exposed": 1e-7, "number": 0}
    second = C | {"dtype": "bfloat16", "exposed": 19.9e-6, "asked": [1], "number": 1}
    order, gaps, taken = [0, 1, ~1, ~0], [0.0] * 4, [0.0, 0.0]
    seconds, exposed = replayed(order, gaps, taken, 0.0, [10e-6, 10e-6])
    assert (seconds, exposed) == (pytest.approx(20e-6), pytest.approx([0.0, 20e-6]))
    graph = {"order": order, "gaps": gaps, "taken": taken, "computing": 0.0, "seconds": 20e-6, "peak_bytes": 0}
    (mine, _) = of({"graphs": {"forward": graph}, "collectives": [first, second]})
    assert mine[0].step == pytest.approx(4e-6)


def test_none_and_why():
    short = only(C | {"dtype": "bfloat16", "fixed": 9e-6})
    assert (short.write, "start of a collective" in short.why) == ("", True)
    long = only(C | {"dtype": "bfloat16"})
    assert long.why.startswith("add needs it at once")
    assert remedy({"write": "", "why": "so", "saves": 0.0, "step": 0.0}) == "to write: none; so"
    assert said(C | {"exposed": 0.0}) == []


def test_options_that_were_priced():
    """What an option saves of a collective, and of the step; nothing where the step takes no less."""
    priced = {"option": "split_batch", "seconds": {"forward": 1.41e-3}, "peak": {"forward": 90}, "failed": ""}
    priced |= {"exposed": {"forward": {"0": 2e-6}}}
    first, _ = said(C, alternatives=[priced])
    assert (first.write, first.saves, first.step) == (
        "options={'split_batch': 2}",
        pytest.approx(8e-6),
        pytest.approx(0.6e-3),
    )
    worse = priced | {"seconds": {"forward": 3e-3}}
    failed = {"option": "split_batch", "seconds": {}, "peak": {}, "exposed": {}, "failed": "ValueError: no"}
    assert not any("split_batch" in r.write for r in said(C, alternatives=[worse, failed]))


@pytest.fixture
def mesh(fake_mesh):
    return fake_mesh(2, names=("x",))


def dumped(model, x, folder, **options):
    torch.compiler.reset()
    with dtensor.compile.dump(folder):
        torch.compile(model, backend="dtensor", options={"inner": "aot_eager", **options})(x).sum().backward()
    return next(f for f in read(folder) if f.manifest)


def test_options_are_priced_by_the_passes(mesh, tmp_path):
    """Of fully sharded layers, what the backward gathers again could be saved; with the option it is, as priced."""
    made = [fully_shard(nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)]), mesh) for _ in range(2)]
    frame = dumped(made[0], torch.ones(4, 64), tmp_path / "a")
    m = frame.manifest
    priced = {a["option"]: a for a in m["alternatives"]}
    assert {name: a["failed"] for name, a in priced.items()} == {"split_batch": "", "memory_budget": ""}
    (again,) = [c for c in m["collectives"] if c["op"] == "all_gather" and c["direction"] == "backward"]
    best = of(m)[m["collectives"].index(again)][0]
    assert best.write.startswith("options={'memory_budget': ")
    bytes_ = int(best.write.split()[-1].rstrip("}"))
    later = dumped(made[1], torch.ones(4, 64), tmp_path / "b", memory_budget=bytes_).manifest
    assert [c["direction"] for c in later["collectives"] if c["op"] == "all_gather"] == ["forward"]
    for direction, g in later["graphs"].items():
        assert g["seconds"] == pytest.approx(priced["memory_budget"]["seconds"][direction])
        assert g["peak_bytes"] == priced["memory_budget"]["peak"][direction]
    saved = sum([g["seconds"] - later["graphs"][d]["seconds"] for d, g in m["graphs"].items()])
    assert best.step == pytest.approx(saved)
    assert "to write: options={'memory_budget'" in summary(tmp_path / "a", 10)
    (gather, _, reduced) = m["collectives"]
    assert (gather["parameter"], again["parameter"], reduced["parameter"]) == (True, True, False)
    assert reduced["readers"] == ["output"]
    assert {c["class"] for c in m["collectives"]} == {"nn.Linear"}


def test_half_the_bytes_are_sent_as_priced(mesh, tmp_path):
    policies = (None, MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16))
    made, manifests = [], []
    for k, policy in enumerate(policies):
        given = {"mp_policy": policy} if policy else {}
        model = fully_shard(nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)]), mesh, **given)
        manifests.append(dumped(model, torch.ones(4, 64), tmp_path / str(k)).manifest)
        made.append(manifests[-1]["collectives"])
    for wide, half, remedies in zip(*made, of(manifests[0]), strict=True):
        found = [r for r in remedies if "bfloat16" in r.write]
        assert found[0].saves == pytest.approx(wide["seconds"] - half["seconds"], rel=0.01)


def test_a_pass_that_is_switched_off_and_a_price_that_fails(mesh, tmp_path, monkeypatch):
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    fully_shard(model, mesh)
    frame = dumped(model, torch.ones(4, 8), tmp_path / "a", disable=["bucket"])
    found = most_exposed([frame], 3)
    assert "the options without 'disable' and 'passes'" in [r["write"] for c in found for r in c["remedies"]]

    def fails(*_):
        raise RuntimeError("no price\nfor this")

    monkeypatch.setattr(alternatives, "_priced", fails)
    again = dumped(model, torch.ones(4, 8), tmp_path / "b").manifest
    assert [a["failed"] for a in again["alternatives"]] == ["RuntimeError: no price"] * 2
    assert all(of(again))


def test_modules_stand_where_no_line_is_the_users(mesh, tmp_path):
    layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    model = parallelize_module(layers, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    dumped(model, torch.ones(4, 8), tmp_path)
    text = summary(tmp_path)
    assert "requested by nn.Linear in 2" in text
    for path in tmp_path.rglob("*.txt"):
        if path.name[0] == "0":
            assert "style.py" not in path.read_text(), path
    assert "style.py" not in text
