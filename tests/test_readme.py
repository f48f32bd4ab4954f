"""The README's Python is run as it stands, on two processes."""

import re
from pathlib import Path

import torch

from dtensor.testing import with_ranks

README = Path(__file__).resolve().parent.parent / "README.md"


@with_ranks(2)
def test_python_of_the_readme_runs(rank):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert len(blocks) == 4
    names: dict = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert names["z"].full_tensor().equal(torch.arange(12.0).view(4, 3) + 2)
    assert names["scale_rows"](names["x"], names["dtensor"].ones(4, device_mesh=names["mesh"])).shape == (4, 3)
    assert names["masked"].full_tensor()[0].tolist() == [0.0, float("-inf"), float("-inf")]
    assert names["model"].net1.weight.grad is not None
    assert [r.direction for r in names["s"].records] == ["joint", "forward"]
