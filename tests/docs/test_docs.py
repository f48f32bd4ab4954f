"""The names in the migration tables are there: those of torch on the left, ours on the right."""

import importlib
import re
from pathlib import Path

import pytest
import torch.distributed.fsdp as fsdp
import torch.distributed.tensor as tensor
import torch.distributed.tensor.debug
import torch.distributed.tensor.parallel.input_reshard

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "guides" / "from_torch_dtensor.md"
ROWS = [line.strip("|").split("|") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
NAME = re.compile(r"`((?:dtensor|torch|tensor|fsdp)(?:\.\w+)+)[`(]")
SHORT = {"tensor": "torch.distributed.tensor", "fsdp": "torch.distributed.fsdp"}


def found(name):
    """The object of a dotted name."""
    first, *rest = name.split(".")
    parts = [*SHORT.get(first, first).split("."), *rest]
    for cut in range(len(parts), 0, -1):
        try:
            thing = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for part in parts[cut:]:
            thing = getattr(thing, part)
        return thing
    raise ImportError(name)


NAMES = sorted({name for row in ROWS for cell in row for name in NAME.findall(cell)})


SINCE = {"tensor.linspace": (2, 15), "tensor.logspace": (2, 15)}
"""Names that torch has since a release that is not the first we support."""


@pytest.mark.parametrize("name", NAMES)
def test_the_name_is_there(name):
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if release < SINCE.get(name, release):
        pytest.skip(f"torch has it since {SINCE[name]}")
    assert found(name) is not None


def test_the_table_names_all_of_torchs():
    there = {name for row in ROWS for name in NAME.findall(row[0])}
    for module, short in ((tensor, "tensor"), (tensor.parallel, "tensor.parallel")):
        missing = {f"{short}.{name}" for name in module.__all__} - there
        assert missing <= {"tensor.Placement"}
    assert {"fsdp.fully_shard", "fsdp.MixedPrecisionPolicy"} <= there
    assert fsdp.fully_shard is found("fsdp.fully_shard")
    assert len([row for row in ROWS if NAME.search(row[1])]) >= 25
