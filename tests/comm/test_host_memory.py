"""Tensors on the host: what is fetched is what was put there, and it takes none of the allocator's memory."""

import os
import tempfile

import pytest
import torch

from dtensor.comm.host_memory import from_host_start, to_host
from dtensor.torch_private.core import FakeTensorMode, c10d

CASES = {
    "contiguous": lambda: torch.randn(3, 5),
    "transposed": lambda: torch.randn(3, 5).t(),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "bfloat16": lambda: torch.randn(7).bfloat16(),
    "booleans": lambda: torch.randn(7) > 0,
    "a number": lambda: torch.tensor(3.0),
    "int64": lambda: torch.arange(6).reshape(2, 3),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_fetched_is_what_was_put_there(name):
    x = CASES[name]()
    host = to_host(x)
    kept = x.clone()
    x.zero_()
    y = c10d.wait_tensor(from_host_start(host, x.device))
    assert torch.equal(y, kept)
    assert torch.equal(host, kept)
    assert y.stride() == host.stride() == x.stride()
    with FakeTensorMode() as mode:
        fake = to_host(mode.from_tensor(x))
        assert (fake.shape, fake.stride(), fake.dtype) == (host.shape, host.stride(), host.dtype)
        back = from_host_start(fake, torch.device("cuda"))
        assert (back.stride(), back.dtype, back.device.type) == (y.stride(), y.dtype, "cuda")


def test_the_file_is_gone_when_it_is_mapped(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    host = to_host(torch.ones(5))
    assert os.listdir(tmp_path) == []
    assert host.sum() == 5
