"""What a REPL or a failing test shows of a comparison is a line, however many values it holds."""

import pytest

from . import faults, programs


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    one, two = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    programs.on_one_device(programs.transformer(), programs.batch(), one)
    inject = faults.weight("layers.1.ffn_norm.weight", faults.bit_flip, (1,))
    programs.sharded("sp", programs.transformer(), programs.batch(), two, inject)
    return programs.compared(one, two)


def test_a_comparison(found):
    text = repr(found)
    assert text.startswith(f"<Comparison of <RecordedRun {found.a.folder}: 1 rank, 2 steps, ")
    assert f"<RecordedRun {found.b.folder}: 2 ranks, 2 steps, " in text
    assert (
        f"{len(found.pairs):,} pairs, {len(found.findings)} findings, the first <Finding value of parameter in " in text
    )
    assert len(text) < 1000


def test_everything_that_it_holds_is_one_line(found):
    values = [v for pair in found.pairs for v in (pair.a, pair.b)]
    parts = [p for v in values for p in v.parts.values()]
    held = [*found.pairs, *found.findings, *values, *parts, *[c for v in values for c in v.copies], found.b]
    held += list({id(p.spec): p.spec for p in parts if p.spec is not None}.values())
    for one in held:
        text = repr(one)
        assert text.startswith(f"<{type(one).__name__} ")
        assert "\n" not in text
        assert len(text) < 300


def test_what_a_pair_says(found):
    first = found.first
    (pair,) = [p for p in found.pairs if p.b is first.value]
    assert repr(pair) == (
        "<Pair parameter in layers.1.ffn_norm.weight (parameter, float32[32]), step 0: "
        f"differs by {first.relative:.1e} of its norm, {first.allowed:.1e} allowed>"
    )
    assert repr(first) == (
        "<Finding value of parameter in layers.1.ffn_norm.weight (parameter, float32[32]), step 0, on ranks [1]: "
        f"{first.relative:.1e} of its norm, {first.allowed:.1e} allowed>"
    )
    assert repr(pair.b) == "<RecordedValue parameter in layers.1.ffn_norm.weight (parameter, float32[32]), step 0>"
    assert repr(pair.b.parts[1]) == "<RecordedPart on rank 1: [32]>"
