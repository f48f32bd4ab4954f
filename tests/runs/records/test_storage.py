"""The files of a record: what is damaged, missing or unfinished is said with its name, and no program stops."""

import json
import warnings
import zlib

import pytest
import torch
from torch import nn

import dtensor
from dtensor import RecordError
from dtensor.runs.comparing.values import load
from dtensor.runs.records import storage


@pytest.fixture
def record(tmp_path):
    """A folder with the record of one rank, and its file."""
    with dtensor.record(tmp_path):
        nn.Linear(3, 2)(torch.ones(4, 3)).sum().backward()
    return tmp_path, tmp_path / "rank00000.jsonl"


def line(content):
    text = json.dumps(content)
    return f"{zlib.crc32(text.encode()):08x} {text}\n"


def test_what_is_written_is_read(record):
    folder, path = record
    header, lines, end = storage.read(path)
    assert (header["format"], header["rank"], header["world"]) == (storage.FORMAT, 0, 1)
    assert end == {"steps": 1, "values": len(lines), "failed": ""}
    assert len(load(folder).values) == len(lines)


def test_a_vector_as_text():
    vector = torch.randn(7, dtype=torch.float64).numpy()
    assert (storage.unpacked(storage.packed(vector)) == vector).all()


def test_a_damaged_line(record):
    folder, path = record
    text = path.read_text()
    lines = text.splitlines(keepends=True)
    changed = lines[2].replace('"k":"', '"k":"x', 1)
    assert changed != lines[2]
    path.write_text("".join([*lines[:2], changed, *lines[3:]]))
    with pytest.raises(RecordError, match=r"rank00000\.jsonl is damaged \(the checksum of line 3 is wrong\); record"):
        load(folder)


@pytest.mark.parametrize("written", ["no checksum", "0123456 {}", "zzzzzzzz {}", b"\xff\xfe\n"])
def test_a_file_of_something_else(written, record):
    folder, path = record
    path.write_bytes(written if isinstance(written, bytes) else written.encode())
    with pytest.raises(RecordError, match=r"rank00000\.jsonl is damaged"):
        load(folder)


@pytest.mark.parametrize("kept", [1, 3, -1])
def test_no_end(kept, record):
    folder, path = record
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:kept]))
    with pytest.raises(RecordError, match=r"rank00000\.jsonl has no end: its program still runs, or ended"):
        load(folder)


def test_a_line_cut_in_the_middle(record):
    folder, path = record
    path.write_text(path.read_text()[:-5])
    with pytest.raises(RecordError, match=r"rank00000\.jsonl is damaged"):
        load(folder)


def test_no_header(record):
    folder, path = record
    path.write_text("")
    with pytest.raises(RecordError, match="has no header"):
        load(folder)
    path.write_text(line({"i": 0}))
    with pytest.raises(RecordError, match="has no header"):
        load(folder)


def test_another_format(record):
    folder, path = record
    first, *rest = path.read_text().splitlines(keepends=True)
    path.write_text("".join([line(json.loads(first[9:]) | {"format": 0}), *rest]))
    with pytest.raises(RecordError, match=rf"has format 0, and this version reads format {storage.FORMAT}"):
        load(folder)


def test_a_missing_rank(record):
    folder, path = record
    first, *rest = path.read_text().splitlines(keepends=True)
    path.write_text("".join([line(json.loads(first[9:]) | {"world": 4}), *rest]))
    with pytest.raises(RecordError, match=r"lacks the files of ranks \[1, 2, 3\] of 4"):
        load(folder)


def test_an_empty_folder(tmp_path):
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(RecordError, match="holds no record; name the folder that was given to"):
            load(folder)


class Full:
    """A file on a disk that fills up."""

    def __init__(self, file, lines):
        self.file, self.left = file, lines

    def writelines(self, lines):
        self.left -= len(lines)
        if self.left < 0:
            raise OSError(28, "No space left on device")
        self.file.writelines(lines)

    def __getattr__(self, name):
        return getattr(self.file, name)


@pytest.mark.parametrize("room", [0, 1, 40])
def test_a_full_disk_ends_the_record_and_not_the_program(room, tmp_path, monkeypatch):
    opened = type(tmp_path).open
    monkeypatch.setattr(type(tmp_path), "open", lambda path, mode="r", **more: Full(opened(path, mode, **more), room))
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with dtensor.record(tmp_path) as recorder:
            for _ in range(3):
                model(torch.ones(2, 3)).sum().backward()
                optimizer.step()
    told = [str(w.message) for w in told]
    assert len(told) == 1
    assert "recording ends here, because" in told[0]
    assert "rank00000.jsonl cannot be written: No space left on device; the program goes on" in told[0]
    assert not recorder.open
    assert not model[0].weight.equal(nn.Linear(3, 3).weight)
    monkeypatch.undo()
    with pytest.raises(RecordError):
        load(tmp_path)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="recording ends here"), dtensor.record(tmp_path / "file"):
        assert nn.Linear(3, 2)(torch.ones(1, 3)).shape == (1, 2)


def test_whole_values_that_find_no_room(tmp_path, monkeypatch):
    import numpy as np

    def full(*given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with dtensor.record(tmp_path, values="*"):
        nn.Linear(3, 2)(torch.ones(1, 3))
    assert all(v.first["v"] == "" for v in load(tmp_path).values.values())
