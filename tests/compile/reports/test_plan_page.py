"""The page of a plan: all that `explain` says, as text that no name can turn into markup."""

import re

import pytest
import torch
from torch import nn

from dtensor import Plan, Shard, search
from dtensor.compile.reports.plan_page import page, write_page
from dtensor.parallel.whole_model.prediction import Prediction


def found(**options):
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    return search(model, {"dp": 2, "tp": 4}, torch.empty(64, 64), **options)


def test_a_page_says_what_the_explanation_says(tmp_path):
    plan = found(memory=1e9, what_if=True)
    write_page(plan, tmp_path / "plan.html", "<b>mine</b>")
    html = (tmp_path / "plan.html").read_text()
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", html))
    assert "&lt;b&gt;mine&lt;/b&gt;" in html
    assert "A step is expected to take" in text
    assert "Within" in text
    for name in (*plan.prediction.others, *plan.prediction.what_if, "this plan"):
        assert name in text
    for name in plan.prediction.modules:
        assert f"<td>{name or 'outside'}</td>" in html
    assert "http" not in html


def test_memory_by_module_adds_up_to_that_of_the_plan():
    plan = found()
    static = sum(a for a, _ in plan.prediction.held.values())
    assert static == pytest.approx(plan.prediction.static)


def test_nothing_to_show():
    with pytest.raises(ValueError, match=r"dtensor\.predict does that"):
        page(Plan({"tp": 2}, {"weight": {"tp": Shard(0)}}))
    empty = page(Plan({"tp": 2}, prediction=Prediction(seconds=1.0)))
    assert "this plan" in empty
