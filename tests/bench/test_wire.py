"""What a step sends, against the optimum by hand: exact, so that a change of one collective or byte is seen."""

import pytest

from bench.cases import wire
from bench.models import named
from bench.plans import RANKS
from bench.record import OURS
from bench.sides import SIDES, reason
from bench.uncoded import UNCODED

BY_DAY = ("tp", "2d")
AT_NIGHT = [("mlp", plan) for plan in RANKS if plan not in BY_DAY]
AT_NIGHT += [("transformer-2", plan) for plan in ("tp", "sp", "2d")]
CASES = [("mlp", plan) for plan in BY_DAY] + [pytest.param(*case, marks=pytest.mark.nightly) for case in AT_NIGHT]


@pytest.mark.parametrize(("name", "plan"), CASES)
def test_no_more_is_sent_than_by_hand(name, plan):
    model = named(name, wire.SIZES)
    ours, hand = (wire.count(side, model, plan, RANKS[plan]) for side in (OURS, "by hand"))
    for direction in wire.DIRECTIONS:
        assert ours.counts[direction].calls <= hand.counts[direction].calls, direction
    extra = ours.total.bytes - hand.total.bytes
    assert extra <= 0 if plan in ("fsdp", "hsdp", "2d") else extra == 0
    if plan in ("tp", "sp"):
        assert ours.total.collectives == hand.total.collectives


@pytest.mark.nightly
def test_what_torch_sends_is_counted_alike():
    """The numbers that tensor parallelism of torch is known by: those of the design, and the passes of Inductor."""
    model = named("transformer-2", wire.SIZES)
    found = {side: wire.count(side, model, "tp", 2) for side in ("torch eager", "torch tuned")}
    eager = {d: dict(c.collectives) for d, c in found["torch eager"].counts.items()}
    assert eager == {"forward": {"all_gather": 1, "all_reduce": 6}, "backward": {"all_reduce": 9}, "optimizer": {}}
    assert found["torch tuned"].counts["forward"].collectives["all_reduce"] == 5
    assert found["torch tuned"].total.bytes == found["torch eager"].total.bytes


def test_a_peer_that_fails_is_a_finding(monkeypatch):
    def fails(*_):
        raise NotImplementedError("no strategy\n\nfor this")

    monkeypatch.setitem(UNCODED, "torch eager", lambda fn: fails)
    found = wire.tried("torch eager", named("mlp", wire.SIZES), "tp", 2)
    assert found.error == reason("torch eager", NotImplementedError("no strategy for this"))
    assert set(UNCODED) == set(SIDES) - {"dtensor eager"}
