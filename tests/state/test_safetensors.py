"""Safetensors files: written whole from shards, read shard by shard; against the library of the format."""

import json

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from dtensor import CheckpointError, Partial, Replicate, Shard, distribute_tensor, init_device_mesh, zeros
from dtensor.state.safetensors import DTYPES, export, load, state_dict
from dtensor.tensor.tensor import DTensor
from dtensor.testing import with_ranks, with_threads

FULL = {
    "w": torch.arange(35.0).view(7, 5),
    "half": torch.arange(6).to(torch.bfloat16),
    "flag": torch.tensor([True, False, True]),
    "scalar": torch.tensor(3, dtype=torch.int64),
    "none": torch.zeros(0, 4),
}
PLACED = {"w": [Shard(0), Shard(1)], "half": [Shard(0), Shard(0)], "flag": [Replicate(), Shard(0)]}


def sharded(mesh):
    return {k: distribute_tensor(v, mesh, PLACED.get(k, [Replicate()] * 2)) for k, v in FULL.items()}


@with_threads(4)
def test_written_and_read_on_another_mesh(rank, tmp_path):
    grid, flat = init_device_mesh("cpu", (2, 2)), init_device_mesh("cpu", (4,))
    path = tmp_path / "model.safetensors"
    export({**sharded(grid), "plain": torch.ones(2)}, path, metadata={"format": "pt"})
    state = {
        k: zeros(
            tuple(v.shape), dtype=v.dtype, device_mesh=flat, placements=[Shard(v.dim() - 1) if v.dim() else Replicate()]
        )
        for k, v in FULL.items()
    }
    state["plain"] = torch.zeros(2, dtype=torch.float64)
    assert load(state, path) == []
    for name, value in FULL.items():
        assert torch.equal(state[name].full_tensor(), value), name
    assert torch.equal(state["plain"], torch.ones(2, dtype=torch.float64))
    assert not path.with_name("model.safetensors.partial").exists()


@with_ranks(3)
def test_tensors_on_a_mesh_without_the_first_rank(rank, tmp_path):
    """Which writes the file; it was written without them."""
    mesh = DeviceMesh("cpu", [1, 2])
    export({"w": distribute_tensor(FULL["w"], mesh, [Shard(0)]), "plain": torch.ones(2)}, tmp_path / "w.safetensors")
    state = {"w": torch.zeros(7, 5), "plain": torch.zeros(2)}
    assert load(state, tmp_path / "w.safetensors") == []
    assert torch.equal(state["w"], FULL["w"])
    assert torch.equal(state["plain"], torch.ones(2))


@with_ranks(4)
def test_tensors_on_a_slice_of_a_mesh(rank, tmp_path):
    """Ranks that are in another slice than rank 0 sent it their tensor, which it did not receive."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    export({"w": distribute_tensor(FULL["w"], mesh["tp"], [Shard(0)])}, tmp_path / "w.safetensors")
    state = state_dict(tmp_path / "w.safetensors")
    assert state["w"].is_meta
    assert distribute_tensor(state["w"], mesh, PLACED["w"]).full_tensor().equal(FULL["w"])


def test_it_is_the_format_of_the_library(tmp_path):
    library = pytest.importorskip("safetensors.torch", reason="not installed; write: pip install safetensors")
    every = {str(d): torch.arange(3).to(d) for d in DTYPES.values()}
    export({**FULL, **every}, tmp_path / "ours", metadata={"format": "pt"})
    read = library.load_file(tmp_path / "ours")
    assert set(read) == {*FULL, *every}
    for name, value in {**FULL, **every}.items():
        assert read[name].dtype == value.dtype
        assert torch.equal(read[name].to(torch.complex128), value.to(torch.complex128)), name
    library.save_file(FULL, tmp_path / "theirs")
    state = {k: torch.zeros_like(v) for k, v in FULL.items()}
    load(state, tmp_path / "theirs")
    assert all(torch.equal(state[k], v) for k, v in FULL.items())


def test_several_files_and_what_does_not_fit(tmp_path):
    export({"a": torch.ones(2)}, tmp_path / "1.safetensors")
    export({"b": torch.zeros(3)}, tmp_path / "2.safetensors")
    with pytest.raises(CheckpointError, match=r"nor a folder with one such file or model.safetensors.index.json"):
        load({}, tmp_path)
    names = {"a": "1.safetensors", "b": "2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    state = {"a": torch.zeros(2), "b": torch.ones(3)}
    load(state, tmp_path)
    assert state["a"].tolist() == [1, 1]
    assert state["b"].tolist() == [0, 0, 0]
    with pytest.raises(CheckpointError, match=r"lacks 'c', and has in addition 'b'; write strict=False"):
        load({"a": torch.zeros(2), "c": torch.zeros(1)}, tmp_path)
    assert load({"a": torch.zeros(2), "c": torch.zeros(1)}, tmp_path, strict=False) == ["c"]
    with pytest.raises(CheckpointError, match=r"'a' has shape \[2\] in .*, but \[3\] in the state"):
        load({"a": torch.zeros(3), "b": torch.zeros(3)}, tmp_path)


def test_what_is_torn_or_cannot_be_written(tmp_path):
    path = tmp_path / "model.safetensors"
    export(FULL, path)
    whole = path.read_bytes()
    for length, message in (
        (4, "less than its header"),
        (100, "less than its header"),
        (len(whole) - 1, "was cut short"),
    ):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=message):
            load({k: torch.zeros_like(v) for k, v in FULL.items()}, path)
    with pytest.raises(TypeError, match="'step' is int, leave it out"):
        export({"step": 3}, path)
    with pytest.raises(ValueError, match=r"cannot hold torch.complex128, the dtype of 'z'"):
        export({"z": torch.zeros(1, dtype=torch.complex128)}, path)


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"{",
        b"[" * 100_000,
        b"\xff",
        b'{"w": 1}',
        b'{"w": {}}',
        b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0]}}',
        b'{"w": {"dtype": "F32", "shape": "2", "data_offsets": [0, 8]}}',
        b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"w": {"dtype": "F32", "shape": [-2], "data_offsets": [8, 0]}}',
        b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 80]}}',
        b'{"w": {"dtype": "F3", "shape": [2], "data_offsets": [0, 8]}}',
    ],
)
def test_headers_that_are_none(tmp_path, header):
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load({"w": torch.zeros(2)}, path)


@pytest.mark.parametrize(
    "index", ["[]", "{", '{"weight_map": 1}', '{"weight_map": {"w": 1}}', '{"weight_map": {"w": "a"}}']
)
def test_an_index_that_is_none(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match="copy it again"):
        load({"w": torch.zeros(2)}, tmp_path)


@with_ranks(2)
def test_an_error_while_writing_is_one_on_all_ranks(rank, tmp_path):
    mesh = init_device_mesh("cpu", (2,))
    x = {"x": distribute_tensor(torch.ones(4), mesh, [Shard(0)])}
    with pytest.raises(CheckpointError, match=r"could not be written: .*No such file or directory"):
        export(x, tmp_path / "missing" / "model.safetensors")
    export({"p": DTensor.from_local(torch.ones(2), mesh, [Partial()])}, tmp_path / "p.safetensors")
    read = {"p": torch.zeros(2)}
    load(read, tmp_path / "p.safetensors")
    assert read["p"].tolist() == [2, 2]
