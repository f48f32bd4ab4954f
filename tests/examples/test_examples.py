"""The examples give the loss curve of one device, and docs/guides/examples.md shows what they add to its script."""

import contextlib
import difflib
import functools
import io
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from dtensor.testing import run_ranks

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = ROOT / "examples"
RANKS = {"tensor_parallel": 2, "fully_sharded": 2, "two_dimensional": 4, "global_view": 4}


def printed(name, **compiled):
    """What an example prints, with other arguments of torch.compile."""
    kept, out = torch.compile, io.StringIO()
    sys.path.insert(0, str(EXAMPLES))
    torch.compile = lambda model, **kwargs: kept(model, **{**kwargs, **compiled})
    try:
        with contextlib.redirect_stdout(out):
            runpy.run_path(str(EXAMPLES / f"{name}.py"))
    finally:
        torch.compile = kept
        sys.path.remove(str(EXAMPLES))
    return out.getvalue()


def on_rank(rank, name, options):
    return printed(name, fullgraph=True, options=options)


@functools.cache
def one_device():
    return losses(printed("one_device", backend="eager"))


def losses(text):
    return [float(loss) for loss in re.findall(r"step \d+ loss (\S+)", text)]


@pytest.mark.nightly
@pytest.mark.parametrize("options", [{"inner": "aot_eager"}, {}])
@pytest.mark.parametrize("name", RANKS)
def test_each_gives_the_curve_of_one_device(name, options):
    assert len(one_device()) == 10
    assert one_device()[-1] < 0.8 * one_device()[0]
    for text in run_ranks(on_rank, RANKS[name], name, options):
        assert losses(text) == pytest.approx(one_device(), abs=2e-5)


def code(name):
    """The lines of an example from its first import on."""
    text = (EXAMPLES / f"{name}.py").read_text()
    return text[text.index("\nimport torch\n") + 1 :].splitlines()


def added(name):
    """The example as a difference to the script of one device, with a line around each change."""
    lines = list(difflib.unified_diff(code("one_device"), code(name), n=1, lineterm=""))
    return "\n".join(["…" if line.startswith("@@") else line for line in lines[2:]][1:])


def test_the_page_shows_them():
    page = (ROOT / "docs" / "guides" / "examples.md").read_text()
    assert re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL) == ["\n".join(code("one_device")) + "\n"]
    shown = re.findall(r"```diff\n(.*?)\n```", page, flags=re.DOTALL)
    assert shown == [added(name) for name in RANKS]
