"""The doors of the case of that name: each trains as one device does, and by hand as little is sent as is known."""

import pytest
import torch
import torch.distributed as dist

from bench.cases import doors
from bench.doors.doors import TORCH_FSDP, TRAINING, WORDS, Missing, opened
from bench.doors.subjects import SUBJECTS
from dtensor import init_device_mesh
from dtensor.testing import run_ranks

STEPS = 3
REFUSED = {("gpt2", "torch tp")}
"""torch's styles take no Conv1D."""


def losses(rank, name):
    """Of one device, and behind each door the mean over ranks, which have their own parts behind some."""
    subject = SUBJECTS[name]
    model, found = subject.model(), dict[str, list[float]]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        loss = model(**subject.batch())["loss"]
        loss.backward()
        optimizer.step(), optimizer.zero_grad()
        found.setdefault("one device", []).append(loss.item())
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for door in WORDS:
        if (name, door) in REFUSED:
            continue
        try:
            behind = opened(door, name, mesh, TRAINING, lambda fn: fn)
        except Missing:
            continue
        for _ in range(STEPS):
            mean = torch.tensor(behind.step())
            dist.all_reduce(mean)
            found.setdefault(door, []).append(mean.item() / 2)
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("name", SUBJECTS)
def test_all_doors_train_alike(name):
    found = run_ranks(losses, 2, name, timeout=600)[0]
    want = torch.tensor(found.pop("one device"))
    assert want[0] > want[-1]
    for door, got in found.items():
        torch.testing.assert_close(torch.tensor(got), want, rtol=2e-4, atol=0, msg=f"{door}: {{}}".format)
    assert {"styles", "sequence", "placements", "auto", TORCH_FSDP} <= found.keys()


@pytest.mark.nightly
def test_by_hand_each_pair_of_layers_is_summed_up_once():
    """The figure that all others are compared with: four sums of the activations each way, and nothing beside."""
    found = doors.count("styles", "vit", "2", TRAINING)
    size = 8 * 122 * 256 * 4
    for direction in ("forward", "backward"):
        assert dict(found[direction].collectives) == {"all_reduce": 4}
        assert found[direction].bytes == 4 * size
    assert not found["optimizer"].calls
