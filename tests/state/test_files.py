"""Checkpoints are data: nothing in them is run, and no byte of them can change unnoticed."""

import json
import os
import pickle
import random
import shutil
import threading
import time
import zlib
from concurrent import futures
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from torch.distributed.checkpoint.api import CheckpointException

from dtensor import (
    CheckpointError,
    Checkpoints,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    load_torch_checkpoint,
)
from dtensor.state.index import INDEX, covers
from dtensor.state.verify import verify
from dtensor.testing import with_ranks
from dtensor.tools.cli import main

VALUES = {
    "model": {"w": torch.arange(35.0).view(7, 5), "empty": torch.zeros(0, 3), "half": torch.ones(5).bfloat16()},
    "flags": torch.tensor([True, False]),
    "rates": [0.5, {"warm": 3}],
    "name": "a run",
    "nothing": None,
}


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, mark):
        self.mark = str(mark)

    def __reduce__(self):
        return os.mkdir, (self.mark,)


def fresh():
    return {
        "model": {k: torch.full_like(x, 9) for k, x in VALUES["model"].items()},
        "flags": torch.tensor([False, False]),
        "rates": [0.0, {"warm": 0}],
        "name": "",
        "nothing": 1,
    }


def saved(folder):
    Checkpoints(folder).save(VALUES, 1)
    return folder / "step-00000001"


def loaded(folder):
    state = fresh()
    Checkpoints(folder).load(state)
    return state


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b) and a.dtype == b.dtype
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def content(path):
    return json.loads((path / INDEX).read_text())["content"]


def rewrite(path, change):
    """Write an index again after `change`, with a checksum that is right."""
    inside = content(path)
    change(inside)
    write(path, inside)


def write(path, inside):
    def text(x):
        return json.dumps(x, separators=(",", ":"))

    (path / INDEX).write_text(text({"crc32": zlib.crc32(text(inside).encode()), "content": inside}))


def test_all_kinds_of_values_come_back(tmp_path):
    saved(tmp_path)
    assert same(loaded(tmp_path), VALUES)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # torch's word on a process without groups
def test_every_changed_byte_is_noticed(tmp_path):
    """Each in the newest of two checkpoints: it is passed over, and `verify` says what is wrong."""
    chosen = random.Random(0)
    path = saved(tmp_path)
    shutil.copytree(path, tmp_path / "step-00000000")
    files = sorted(p for p in path.iterdir() if p.stat().st_size)
    for _ in range(100):
        file = chosen.choice(files)
        before = file.read_bytes()
        k = chosen.randrange(len(before))
        file.write_bytes(before[:k] + bytes([before[k] ^ 1 << chosen.randrange(8)]) + before[k + 1 :])
        assert verify(path), (file, k)
        with pytest.warns(UserWarning, match="step 1 is damaged"):
            assert Checkpoints(tmp_path).load(fresh()) == 0, (file, k)
        with pytest.warns(UserWarning, match="step 1 is damaged"):
            assert Checkpoints(tmp_path).newest() == 0
        file.write_bytes(before)
    assert verify(path) == ""


def value_is_evil(folder, mark):
    path = saved(folder)
    raw = pickle.dumps(Evil(mark))
    (path / "rank-00001.bin").write_bytes(raw)

    def point(inside):
        inside["files"]["rank-00001.bin"] = len(raw)
        whole = {"file": "rank-00001.bin", "begin": 0, "length": len(raw), "crc32": zlib.crc32(raw), "sizes": []}
        inside["values"] = dict.fromkeys(inside["values"], whole)

    rewrite(path, point)


def index_is_a_pickle(folder, mark):
    (saved(folder) / INDEX).write_bytes(pickle.dumps(Evil(mark)))


def dtype_is_a_function(folder, mark):
    rewrite(saved(folder), lambda inside: inside["tensors"]["flags"].update(dtype="load"))


def file_is_outside(folder, mark):
    path = saved(folder)
    (folder / "rank-00007.bin").write_bytes(pickle.dumps(Evil(mark)))

    def point(inside):
        size = (folder / "rank-00007.bin").stat().st_size
        inside["files"]["../rank-00007.bin"] = size
        inside["values"]["name"].update(file="../rank-00007.bin", begin=0, length=size)

    rewrite(path, point)


def a_pickle_lies_beside(folder, mark):
    path = saved(folder)
    (path / ".metadata").write_bytes(pickle.dumps(Evil(mark)))
    (path / INDEX).unlink()


def theirs(folder):
    dcp.save({"w": torch.ones(3), "name": "x"}, checkpoint_id=folder)
    return folder


def metadata_is_evil(folder, mark):
    (theirs(folder) / ".metadata").write_bytes(pickle.dumps(Evil(mark)))


def changed_metadata(folder, change):
    path = theirs(folder) / ".metadata"
    found = pickle.loads(path.read_bytes())
    change(found)
    path.write_bytes(pickle.dumps(found))


def metadata_holds_evil(folder, mark):
    changed_metadata(folder, lambda found: setattr(found, "planner_data", [Evil(mark)]))


def metadata_evaluates(folder, mark):
    text = f"__import__('os').mkdir({str(mark)!r})"
    (theirs(folder) / ".metadata").write_bytes(b"cbuiltins\neval\n(V" + text.encode() + b"\ntR.")


def metadata_goes_by_dots(folder, mark):
    """By a name that leads through attributes of a module that is allowed."""

    def short(text):
        return b"\x8c" + bytes([len(text)]) + text.encode()  # pickle's SHORT_BINUNICODE

    called = short("torch.serialization") + short("os.mkdir") + b"\x93"  # STACK_GLOBAL
    (theirs(folder) / ".metadata").write_bytes(b"\x80\x04" + called + short(str(mark)) + b"\x85R.")


def evil_of_theirs(name):
    """The bytes of one value or tensor of torch's checkpoint are a pickle of ours."""

    def attack(folder, mark):
        raw = pickle.dumps(Evil(mark))

        def change(found):
            (info,) = [info for index, info in found.storage_data.items() if index.fqn == name]
            info.relative_path, info.offset, info.length = "evil.distcp", 0, len(raw)
            (folder / "evil.distcp").write_bytes(raw)

        changed_metadata(folder, change)

    return attack


def file_of_theirs_is_outside(folder, mark):
    def change(found):
        for info in found.storage_data.values():
            info.relative_path = f"../{folder.name}/{info.relative_path}"

    changed_metadata(folder, change)


LOADER = r"Weights only load failed|Unsupported"
OURS = {
    value_is_evil: rf"'name' .*{LOADER}",
    index_is_a_pickle: "is not text|not as it was written",
    dtype_is_a_function: "not as it was written",
    file_is_outside: "not as it was written",
    a_pickle_lies_beside: "checkpoint.json is missing",
}
THEIRS = {
    metadata_is_evil: r"refers to posix\.mkdir",
    metadata_holds_evil: r"refers to posix\.mkdir",
    metadata_evaluates: r"refers to builtins\.eval",
    metadata_goes_by_dots: r"refers to torch\.serialization\.os\.mkdir",
    evil_of_theirs("name"): rf"'name' .*{LOADER}",
    evil_of_theirs("w"): LOADER,
    file_of_theirs_is_outside: "not a file in its folder",
}


@pytest.mark.parametrize(("attack", "refused"), [*OURS.items(), *THEIRS.items()])
def test_nothing_that_a_folder_holds_is_run(tmp_path, attack, refused):
    folder, mark = tmp_path / "c", tmp_path / "m"
    attack(folder, mark)
    load = Checkpoints(folder).load if attack in OURS else partial(load_torch_checkpoint, folder=folder)
    with pytest.raises(CheckpointError, match=refused):
        load(fresh() if attack in OURS else {"w": torch.zeros(3), "name": ""})
    assert not mark.exists()


def test_the_attacks_would_work(tmp_path):
    """Torch's own loader runs what three of them say."""
    for k, attack in enumerate((metadata_is_evil, metadata_evaluates, metadata_goes_by_dots)):
        folder, mark = tmp_path / f"c{k}", tmp_path / f"m{k}"
        attack(folder, mark)
        with pytest.raises(CheckpointException, match="RANK 0"):
            dcp.load({"w": torch.zeros(3)}, checkpoint_id=folder)
        assert mark.exists(), attack


def test_a_checkpoint_of_torch_is_read(tmp_path):
    state = {"w": torch.zeros(3), "name": ""}
    load_torch_checkpoint(state, theirs(tmp_path / "c"))
    assert same(state, {"w": torch.ones(3), "name": "x"})
    with pytest.raises(CheckpointError, match=r"\.metadata cannot be read: there is no such file"):
        load_torch_checkpoint(state, tmp_path)


def test_a_checkpoint_of_torch_that_holds_half_of_a_tensor_is_not_read(tmp_path):
    """Nor is anything else in it: the state stays as it was."""
    folder = theirs(tmp_path / "c")

    def halve(found):
        kind = found.state_dict_metadata["w"]
        kind.size = torch.Size([6])

    changed_metadata(folder, halve)
    state = {"w": torch.full((6,), 9.0), "name": "before"}
    with pytest.raises(CheckpointError, match=r"has only a part of 'w': .* save again from all ranks"):
        load_torch_checkpoint(state, folder)
    assert same(state, {"w": torch.full((6,), 9.0), "name": "before"})


def test_chunks_cover_a_tensor_if_each_element_is_in_one():
    """Compared with marking the elements one by one."""
    draw, seen = random.Random(0), set()
    for _ in range(500):
        shape = [draw.randrange(4) for _ in range(draw.randrange(4))]
        chunks = []
        for _ in range(draw.randrange(5)):
            offsets = [draw.randrange(n + 1) for n in shape]
            chunks.append((offsets, [draw.randrange(n - at + 1) for n, at in zip(shape, offsets)]))
        if draw.random() < 0.3:
            chunks += [([0] * len(shape), shape)]
        held = torch.zeros(shape, dtype=torch.bool)
        for offsets, sizes in chunks:
            held[tuple(slice(at, at + n) for at, n in zip(offsets, sizes))] = True
        wanted = bool(held.all())
        assert covers(shape, chunks) is wanted, (shape, chunks)
        seen.add((wanted, len(shape)))
    assert {(whole, dims) for whole in (True, False) for dims in (0, 1, 2, 3)} <= seen


def a_text(text):
    return lambda path: (path / INDEX).write_text(text)


def changed(**entries):
    return lambda path: rewrite(path, lambda inside: inside.update(entries))


def of_w(**entries):
    return lambda path: rewrite(path, lambda inside: inside["tensors"]["w"].update(entries))


def part_of_w(**entries):
    return lambda path: rewrite(path, lambda inside: inside["tensors"]["w"]["parts"][0].update(entries))


def cut(path):
    os.truncate(path / "rank-00001.bin", 3)


def pipe(path):
    (path / INDEX).unlink()
    os.mkfifo(path / INDEX)


def folder_instead(path):
    (path / "rank-00000.bin").unlink()
    (path / "rank-00000.bin").mkdir()


DAMAGE = {
    "a list": a_text("[]"),
    "a number": a_text("3"),
    "nothing": a_text(""),
    "no JSON": a_text("{"),
    "deep": a_text("[" * 100_000),
    "other keys": a_text('{"files":{}}'),
    "no checksum": a_text('{"content":{}}'),
    "no index": lambda path: (path / INDEX).unlink(),
    "no text": lambda path: (path / INDEX).write_bytes(b"\xff\xfe\x00"),
    "a pipe": pipe,
    "no file": lambda path: (path / "rank-00001.bin").unlink(),
    "a folder": folder_instead,
    "cut": cut,
    "longer": lambda path: (path / "rank-00000.bin").open("ab").write(b"x"),
    "another format": changed(format=2),
    "files are a list": changed(files=[]),
    "another shape": of_w(shape=[1000, 1000]),
    "no such dtype": of_w(dtype="float33"),
    "negative": part_of_w(begin=-1),
    "too far": part_of_w(begin=1 << 40),
    "another length": part_of_w(length=1),
    "another checksum": part_of_w(crc32=0),
    "a truth for a number": part_of_w(begin=True),
    "another tensor": lambda path: rewrite(path, lambda inside: inside["tensors"].pop("w")),
}


@with_ranks(2)
def test_what_is_damaged_is_an_error_on_all_ranks(rank, tmp_path):
    mesh = init_device_mesh("cpu", (2,))
    state = {"w": distribute_tensor(torch.arange(35.0).view(7, 5), mesh, [Shard(0)]), "epoch": 3}
    checkpoints = Checkpoints(tmp_path / "c")
    checkpoints.save(state, 1)
    for name, damage in DAMAGE.items():
        if rank == 0:
            shutil.copytree(tmp_path / "c" / "step-00000001", tmp_path / name / "step-00000001")
            damage(tmp_path / name / "step-00000001")
        dist.barrier()
        begin = time.monotonic()
        for step in (1, None):
            with pytest.raises(CheckpointError):
                Checkpoints(tmp_path / name).load(state, step)
        assert time.monotonic() - begin < 10, name
    checkpoints.load(state, 1)


@with_ranks(2)
def test_ranks_that_ask_for_different_things_or_for_what_cannot_be(rank, tmp_path):
    mesh = init_device_mesh("cpu", (2,))
    state = {"w": distribute_tensor(torch.ones(4), mesh, [Replicate()])}
    checkpoints = Checkpoints(tmp_path / "c")
    with pytest.raises(
        CheckpointError, match=r"same calls with the same arguments; here save\(step=0\) on rank 0, save\(ste"
    ):
        checkpoints.save(state, rank)
    with pytest.raises(CheckpointError, match=r"newest\(\) on rank 0, load\(step=None\) on rank 1"):
        checkpoints.load(state) if rank else checkpoints.newest()
    with pytest.raises(CheckpointError, match=r"save: step is a number of steps; got 'a' \(rank 1\)"):
        checkpoints.save(state, "a" if rank else 1)  # pyright: ignore
    with pytest.raises(CheckpointError, match="step counts from 0; got -1"):
        checkpoints.save_async(state, -1)
    with pytest.raises(CheckpointError, match=r"the state is a Tensor of shape .*; give a dict"):
        checkpoints.save(torch.ones(3), 1)  # pyright: ignore
    with pytest.raises(CheckpointError, match="'bad' has an object of class object, but a checkpoint holds only tens"):
        checkpoints.save({**state, "bad": object()}, 1)
    if rank == 0:
        (tmp_path / "file").write_text("")
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"step 1 could not be written to .* is a file; give another path"):
        Checkpoints(tmp_path / "file").save(state, 1)
    checkpoints.save(state, 1)
    assert checkpoints.newest() == 1


class Fragile:
    """An object with a state of its own, at which one rank fails."""

    def __init__(self, fails=""):
        self.fails = fails

    def state_dict(self):
        if self.fails == "saving":
            raise RuntimeError("cannot be saved")
        return {"x": torch.ones(2)}

    def load_state_dict(self, state):
        if self.fails == "loading":
            raise RuntimeError("cannot be loaded")
        assert state["x"].tolist() == [1, 1]


@with_ranks(2)
def test_one_rank_fails_before_or_after_torch_reads_and_writes(rank, tmp_path):
    checkpoints = Checkpoints(tmp_path)
    bad = {"m": Fragile("saving" if rank else "")}
    for save in (checkpoints.save, checkpoints.save_async):
        with pytest.raises(CheckpointError, match=r"RuntimeError: cannot be saved \(rank 1\)"):
            save(bad, 1)
    with pytest.raises(CheckpointError, match=r"cannot pickle .*lock.* \(rank 1\)"):
        checkpoints.save_async({"x": threading.Lock() if rank else 1}, 1)
    checkpoints.save_async({"m": Fragile()}, 1).result(60)
    checkpoints.load({"m": Fragile()})
    for when in ("saving", "loading"):
        with pytest.raises(CheckpointError, match=r"step 1 cannot be read into the state: RuntimeError: .* \(rank 1\)"):
            checkpoints.load({"m": Fragile(when if rank else "")})


@with_ranks(2)
def test_a_failure_in_the_background_that_one_rank_has_asked_for(rank, tmp_path):
    """The other one is told by the next call, and so are both: the one that asked does not go on alone."""
    checkpoints, finish = Checkpoints(tmp_path), Checkpoints._finish

    def full(*args):
        raise OSError("no space left")

    Checkpoints._finish = full
    saving = checkpoints.save_async({"x": torch.ones(2)}, 1)
    futures.wait([saving])
    if rank == 0:
        with pytest.raises(CheckpointError, match="no space left"):
            saving.result()
    Checkpoints._finish = finish
    with pytest.raises(CheckpointError, match=r"no space left \(rank 1\)"):
        checkpoints.save({"x": torch.ones(2)}, 2)
    checkpoints.save({"x": torch.ones(2)}, 2)
    assert checkpoints.newest() == 2


def test_the_command_says_which_are_damaged(tmp_path):
    path = saved(tmp_path / "run")
    Checkpoints(tmp_path / "run").save(VALUES, 2)
    told = CliRunner().invoke(main, ["checkpoint", "verify", str(path)])
    assert (told.exit_code, told.stdout.startswith("step-00000001: whole")) == (0, True)
    file = path / "rank-00000.bin"
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    told = CliRunner().invoke(main, ["checkpoint", "verify", str(tmp_path / "run")])
    assert told.exit_code == 1
    assert "step-00000001: damaged: bytes 0 to" in told.stdout
    assert "step-00000002: whole" in told.stdout
    assert CliRunner().invoke(main, ["checkpoint", "verify", str(Path(tmp_path))]).exit_code == 2
