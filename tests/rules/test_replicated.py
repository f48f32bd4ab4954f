"""The table of operators that are known to need whole tensors."""

import warnings

import torch
from torch.distributed.device_mesh import init_device_mesh

from dtensor import Shard, distribute_tensor
from dtensor.rules import WHOLE, rule_of
from dtensor.rules.families.advanced_indexing import MASKS
from dtensor.testing import with_threads

aten = torch.ops.aten
BY_MASK = {"index"}
"""Has a rule, but not for masks."""


def test_it_names_operators_that_exist_and_have_no_rule():
    for name, reason in WHOLE.items():
        packet = getattr(aten, name, None)
        assert packet is not None, name
        assert reason
        found = {rule_of(getattr(packet, o)) is not None for o in packet.overloads()}
        assert found == {name in BY_MASK}, name
    assert torch.bool in MASKS


@with_threads(2)
def test_they_run_whole_without_a_warning(rank):
    mesh = init_device_mesh("cpu", (2,))
    x = torch.tensor([3, 1, 2, 1])
    placed = distribute_tensor(x, mesh, [Shard(0)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.bincount(placed).full_tensor().tolist() == [0, 2, 1, 1]
        assert torch.unique(placed).full_tensor().tolist() == [1, 2, 3]
