"""The model of cost beside steps that ran on GPUs."""

import pytest

from bench.published import ROWS, STEPS, predicted


@pytest.mark.parametrize("row", STEPS, ids=lambda row: row.name)
def test_steps_on_one_gpu(row):
    seconds, memory = predicted(row)
    assert seconds == pytest.approx(row.step, rel=0.05)
    assert memory == pytest.approx(row.memory, rel=0.05)


@pytest.mark.nightly
def test_published_steps_and_their_order():
    tokens = {row.name: row.tokens * row.step / predicted(row)[0] for row in ROWS}
    assert tokens == pytest.approx({row.name: row.tokens for row in ROWS}, rel=0.1)
    held = {row.name: predicted(row)[1] for row in ROWS if row.memory is not None}
    assert held == pytest.approx({row.name: row.memory for row in ROWS if row.memory is not None}, rel=0.15)
    assert sorted(tokens, key=tokens.__getitem__) == sorted(tokens, key={r.name: r.tokens for r in ROWS}.__getitem__)
