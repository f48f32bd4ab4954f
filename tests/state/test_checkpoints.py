"""Checkpoints: saved on one mesh, read on another, alone or in the background; what is torn is found; torch's too."""

import contextlib
import copy
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.tensor as theirs
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from dtensor import (
    CheckpointError,
    Checkpoints,
    DTensor,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    zeros,
)
from dtensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from dtensor.state.files import Writer
from dtensor.testing import MLPModule, RankError, run_ranks, with_ranks

FULL = {"w": torch.arange(35.0).view(7, 5), "b": torch.arange(6), "s": torch.tensor(3.0)}
FLAT = {"w": [Shard(0)], "b": [Shard(0)], "s": [Replicate()]}
GRID = {"w": [Shard(1), Shard(0)], "b": [Shard(0), Shard(0)], "s": [Replicate(), Replicate()]}


def placed(mesh, placements, factor=1):
    return {k: distribute_tensor(v * factor, mesh, placements[k]) for k, v in FULL.items()}


def empty(mesh, placements):
    return {
        k: zeros(tuple(v.shape), dtype=v.dtype, device_mesh=mesh, placements=placements[k]) for k, v in FULL.items()
    }


def holds(state, factor=1):
    for name, value in FULL.items():
        assert torch.equal(state[name].full_tensor(), value * factor), name


def steps_on(folder):
    return sorted(p for p in os.listdir(folder) if not p.startswith("."))


@with_ranks(4)
def test_saved_in_both_ways_and_read_on_another_mesh(rank, tmp_path):
    flat, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2):
        checkpoints.save({"model": placed(flat, FLAT, step), "epoch": step}, step)
    values = placed(flat, FLAT, 3)
    future = checkpoints.save_async({"model": values, "epoch": 3}, 3)
    for x in values.values():
        x.zero_()
    future.result(60)
    state = {"model": empty(grid, GRID), "epoch": 0}
    assert checkpoints.load(state) == 3
    assert checkpoints.steps() == [2, 3]
    holds(state["model"], 3)
    assert state["epoch"] == 3
    assert checkpoints.load(state, 2) == 2
    holds(state["model"], 2)
    checkpoints.save({"model": placed(grid, GRID, 5)}, 3)
    state = {"model": empty(flat, FLAT)}
    checkpoints.load(state, 3)
    holds(state["model"], 5)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 7 in .*load\(state, step=…\) can read 2, 3"):
        checkpoints.load(state, 7)
    with pytest.raises(CheckpointError, match=r"of step 3 cannot be read into the state: .*other"):
        checkpoints.load({"model": {"other": torch.zeros(2)}})
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        Checkpoints(tmp_path / "none").load(state)


@with_ranks(2)
def test_keep_is_asked_of_all_ranks(rank, tmp_path):
    """And no rank waits for one that raised while it was made."""
    for keep in (0, -1, True, 1.5, "2"):
        with pytest.raises(CheckpointError, match=re.escape(f"or None for all; got {keep!r}")):
            Checkpoints(tmp_path, keep=keep if rank else 2)
    with pytest.raises(CheckpointError, match=r"here Checkpoints\(keep=1\) on rank 0, Checkpoints\(keep=2\) on rank 1"):
        Checkpoints(tmp_path, keep=rank + 1)


@with_ranks(2)
def test_torn_files_are_found(rank, tmp_path):
    mesh = init_device_mesh("cpu", (2,))
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(placed(mesh, FLAT, step), step)
    state = empty(mesh, FLAT)
    dist.barrier()
    if rank == 0:
        with open(tmp_path / "step-00000002" / "rank-00001.bin", "rb+") as file:
            file.truncate(10)
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"of step 2 is damaged: rank-00001.bin has 10 bytes of .* can read 1"):
        checkpoints.load(state, 2)
    with passed_over(rank, r"reading the checkpoint of step 1 in .*; that of step 2 is damaged: rank-00001.bin has 10"):
        assert checkpoints.load(state) == 1
    holds(state, 1)
    with passed_over(rank, "that of step 2"):
        assert checkpoints.newest() == 1
    dist.barrier()
    if rank == 0:
        os.remove(tmp_path / "step-00000001" / "checkpoint.json")
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"of step 1 is damaged: checkpoint.json is missing"):
        checkpoints.load(state, 1)
    assert checkpoints.newest() is None
    with pytest.raises(CheckpointError, match=r"no intact checkpoint in .*step 2 .*; that of step 1 is damaged"):
        checkpoints.load(state)


def passed_over(rank, message):
    """The first rank says what is passed over."""
    return pytest.warns(UserWarning, match=message) if rank == 0 else contextlib.nullcontext()


def dies_while_saving(rank, folder):
    mesh = init_device_mesh("cpu", (2,))
    checkpoints = Checkpoints(folder)
    checkpoints.save(placed(mesh, FLAT, 1), 1)
    if rank == 1:
        Writer.write_data = lambda *args, **kwargs: os._exit(1)
    checkpoints.save(placed(mesh, FLAT, 2), 2)


def reads(rank, folder):
    mesh = init_device_mesh("cpu", (2,))
    checkpoints = Checkpoints(folder)
    state = empty(mesh, FLAT)
    step = checkpoints.load(state)
    holds(state, step)
    checkpoints.save(placed(mesh, FLAT, 2), 2)
    return step


def test_a_rank_that_dies_while_saving_loses_nothing_earlier(tmp_path):
    with pytest.raises(RankError):
        run_ranks(dies_while_saving, 2, tmp_path)
    assert steps_on(tmp_path) == ["step-00000001"]
    assert run_ranks(reads, 2, tmp_path) == [1, 1]
    assert steps_on(tmp_path) == ["step-00000001", "step-00000002"]


def interrupted(monkeypatch, folder, method, call):
    """Call number `call` of `method` of Path or shutil on something in `folder` does not happen any more."""
    owner, name = method
    kept, calls = getattr(owner, name), []

    def die(*args, **kwargs):
        calls.extend([args] if args[0].parent == folder else [])
        if len(calls) >= call:
            raise KeyboardInterrupt
        return kept(*args, **kwargs)

    monkeypatch.setattr(owner, name, die)


@pytest.mark.parametrize(
    ("method", "call", "left"),
    [((Path, "rename"), 1, 5), ((Path, "rename"), 2, 5), ((shutil, "rmtree"), 1, 5), ((shutil, "rmtree"), 2, 6)],
)
def test_a_checkpoint_that_is_replaced_is_there_at_any_moment(monkeypatch, tmp_path, method, call, left):
    """Whether it is the one before or the one after, it is whole."""
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2):
        checkpoints.save({"x": torch.full((3,), step)}, step)
    checkpoints.save({"x": torch.full((3,), 5)}, 2)
    with monkeypatch.context() as patch:
        interrupted(patch, tmp_path, method, call)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save({"x": torch.full((3,), 6)}, 2)
    again = Checkpoints(tmp_path, keep=2)
    assert again.steps() == [1, 2]
    state = {"x": torch.zeros(3, dtype=torch.long)}
    assert again.load(state) == 2
    assert state["x"].tolist() == [left] * 3
    again.save({"x": torch.full((3,), 7)}, 2)
    assert again.load(state) == 2
    assert state["x"].tolist() == [7] * 3
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000002"]


def test_what_is_half_removed_is_no_checkpoint(monkeypatch, tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save({"x": torch.ones(3)}, 1)
    with monkeypatch.context() as patch:
        interrupted(patch, tmp_path, (shutil, "rmtree"), 2)  # the first is for what is replaced
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save({"x": torch.ones(3)}, 2)
    assert checkpoints.steps() == [2]
    checkpoints.save({"x": torch.ones(3)}, 3)
    assert os.listdir(tmp_path) == ["step-00000003"]


def test_a_process_of_an_earlier_job_that_still_writes(monkeypatch, tmp_path):
    """While the next job saves the same step: its save fails, and adds nothing to that of the next."""
    write, earlier, later = Writer.write_data, Checkpoints(tmp_path), Checkpoints(tmp_path)

    def of_earlier(mine, *args, **kwargs):
        def of_later(self, *args, **kwargs):
            written = write(self, *args, **kwargs)
            with contextlib.suppress(OSError):
                (mine.folder / mine.file).write_bytes(b"of an earlier job")
            return written

        monkeypatch.setattr(Writer, "write_data", of_later)
        later.save({"x": torch.ones(3)}, 1)
        return write(mine, *args, **kwargs)

    monkeypatch.setattr(Writer, "write_data", of_earlier)
    with pytest.raises(CheckpointError, match="step 1 could not be written"):
        earlier.save({"x": torch.zeros(3)}, 1)
    state = {"x": torch.empty(3)}
    assert later.newest() == later.load(state) == 1
    assert state["x"].tolist() == [1.0, 1.0, 1.0]
    assert os.listdir(tmp_path) == ["step-00000001"]


@with_ranks(2)
def test_a_save_waits_for_the_one_in_the_background(rank, tmp_path):
    mesh = init_device_mesh("cpu", (2,))
    checkpoints, state = Checkpoints(tmp_path), empty(mesh, FLAT)
    for step in (1, 2, 3):
        checkpoints.save_async(placed(mesh, FLAT, step), step)
    assert checkpoints.load(state) == 3
    holds(state, 3)
    checkpoints.save_async(placed(mesh, FLAT, 4), 4)
    checkpoints.wait()
    # On every rank, however far the first is.
    assert checkpoints.steps() == [1, 2, 3, 4]


@with_ranks(2)
def test_a_failure_in_the_background_is_told_once(rank, tmp_path):
    mesh = init_device_mesh("cpu", (2,))
    checkpoints, finish = Checkpoints(tmp_path), Checkpoints._finish

    def full(*args):
        raise OSError("no space left")

    Checkpoints._finish = full  # which only the first rank does
    with pytest.raises(CheckpointError, match=r"step 0 could not be written to .*no space left"):
        checkpoints.save(placed(mesh, FLAT), 0)
    checkpoints.save_async(placed(mesh, FLAT), 1)
    with pytest.raises(CheckpointError, match=r"step 1 could not be written to .*no space left"):
        checkpoints.save(placed(mesh, FLAT), 2)
    asked = checkpoints.save_async(placed(mesh, FLAT), 2)
    with pytest.raises(CheckpointError, match="step 2 could not be written"):
        asked.result(60)
    Checkpoints._finish = finish
    checkpoints.save(placed(mesh, FLAT), 3)
    assert checkpoints.steps() == [3]


@with_ranks(2)
def test_a_rank_that_cannot_write_is_an_error_on_all(rank, tmp_path):
    mesh = init_device_mesh("cpu", (2,))
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(placed(mesh, FLAT, 1), 1)

    def full(*args, **kwargs):
        raise OSError("no space left")

    write = Writer.write_data
    if rank == 1:
        Writer.write_data = full
    with pytest.raises(CheckpointError, match=r"step 2 could not be written .*no space left.*can read 1"):
        checkpoints.save(placed(mesh, FLAT, 2), 2)
    with pytest.raises(CheckpointError, match=r"step 3 could not be written .*no space left"):
        checkpoints.save_async(placed(mesh, FLAT, 3), 3).result(60)
    Writer.write_data = write
    assert checkpoints.steps() == [1]
    checkpoints.save(placed(mesh, FLAT, 2), 2)
    assert checkpoints.steps() == [1, 2]


def as_theirs(placements):
    return [theirs.Shard(p.dim) if isinstance(p, Shard) else theirs.Replicate() for p in placements]


@with_ranks(4)
def test_checkpoints_of_torch_are_read_and_the_other_way(rank, tmp_path):
    flat, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    dcp.save(
        {k: theirs.distribute_tensor(v, grid, as_theirs(GRID[k])) for k, v in FULL.items()},
        checkpoint_id=tmp_path / "a",
    )
    mine = empty(flat, FLAT)
    dcp.load(mine, checkpoint_id=tmp_path / "a")
    holds(mine)
    dcp.save(placed(grid, GRID, 2), checkpoint_id=tmp_path / "b")
    other = {
        k: theirs.zeros(*v.shape, dtype=v.dtype, device_mesh=flat, placements=as_theirs(FLAT[k]))
        for k, v in FULL.items()
    }
    dcp.load(other, checkpoint_id=tmp_path / "b")
    holds(other, 2)


def started(mesh):
    torch.manual_seed(0)
    model = MLPModule("cpu")
    if mesh is not None:
        model = parallelize_module(model, mesh, {"net1": ColwiseParallel(), "net2": RowwiseParallel()})
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model, optimizer, steps):
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = model(torch.sin(torch.arange(80.0) + step).view(8, 10)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@with_ranks(2)
def test_training_goes_on_where_it_was(rank, tmp_path):
    """Model and optimizer by name: saved sharded on two ranks, read into one device's model, and sharded again."""
    mesh = init_device_mesh("cpu", (2,))
    wanted = train(*started(None), range(6))
    model, optimizer = started(mesh)
    checkpoints = Checkpoints(tmp_path)
    losses = train(model, optimizer, range(3))
    names, state = get_state_dict(model, optimizer)
    checkpoints.save({"model": names, "optimizer": state}, 3)
    for target in (None, mesh):
        model, optimizer = started(target)
        names, state = get_state_dict(model, optimizer)
        checkpoints.load({"model": names, "optimizer": state})
        set_state_dict(model, optimizer, model_state_dict=names, optim_state_dict=state)
        assert losses + train(model, optimizer, range(3, 6)) == pytest.approx(wanted, rel=1e-5)


def test_one_process_without_groups(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(copy.deepcopy(FULL), 4)
    state = {k: torch.zeros_like(v) for k, v in FULL.items()}
    assert checkpoints.load(state) == 4
    assert all(torch.equal(state[k], FULL[k]) for k in FULL)


@with_ranks(2)
def test_a_save_in_the_background_holds_the_values_of_views(rank, tmp_path):
    """Bits that are yet to be applied, strides, collectives under way and copies that follow a base."""
    mesh = init_device_mesh("cpu", (2,))
    z = torch.arange(12.0).view(4, 3) + torch.arange(12.0, 24.0).view(4, 3) * 1j
    views = {
        "conj": lambda z: z.conj(),
        "neg": lambda z: z.conj().imag,
        "both": lambda z: z.conj().imag.t()[1:],
        "transposed": lambda z: z.t(),
        "expanded": lambda z: z.conj()[:1].expand(4, 3),
    }
    state, wanted = {"plain": {}, "dtensor": {}, "local": {}, "in lists": []}, {}
    for name, view in views.items():
        wanted[name] = view(z).clone().resolve_conj().resolve_neg()
        state["plain"][name] = view(z)
        state["dtensor"][name] = view(distribute_tensor(z, mesh, [Shard(0)]))
        state["local"][name] = DTensor.from_local(view(z), mesh, [Replicate()])
        state["in lists"].append([view(z)])
    sharded = distribute_tensor(z, mesh, [Shard(0)])
    state["pending"] = sharded.redistribute(placements=[Replicate()], async_op=True)
    base = distribute_tensor(z.clone(), mesh, [Shard(0)])
    state["stale"] = base.view(-1)  # twelve elements of rows that are sharded: shares memory or follows its base
    state["follows"] = base[1:3]
    base.mul_(2)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save_async(state, 2).result(60)
    checkpoints.save(state, 1)
    for step in (1, 2):
        found = {
            kind: {name: torch.zeros_like(x) for name, x in wanted.items()} for kind in ("plain", "dtensor", "local")
        }
        found["in lists"] = [[torch.zeros_like(x)] for x in wanted.values()]
        found |= {"pending": torch.zeros_like(z), "stale": torch.zeros_like(z.view(-1))}
        found["follows"] = torch.zeros_like(z[1:3])
        checkpoints.load(found, step)
        for (name, x), (listed,) in zip(wanted.items(), found["in lists"]):
            for got in (*(found[kind][name] for kind in ("plain", "dtensor", "local")), listed):
                assert torch.equal(got, x), (step, name)
        assert torch.equal(found["pending"], z)
        assert torch.equal(found["stale"], 2 * z.view(-1))
        assert torch.equal(found["follows"], 2 * z[1:3])


@with_ranks(2)
def test_values_that_ranks_do_not_share(rank, tmp_path):
    """Told on all ranks before anything is written; what each rank has under a key of its own is saved."""
    checkpoints = Checkpoints(tmp_path)
    for save in (checkpoints.save, checkpoints.save_async):
        with pytest.raises(CheckpointError, match=r"'at.k' is 0 on rank 0 and 1 on rank 1.*f'at.k/\{rank\}'"):
            save({"same": 1, "at": {"k": rank}}, 1)
        assert checkpoints.newest() is None
    checkpoints.save({"same": 1, f"own{rank}": rank}, 1)
    found = {"same": 0, f"own{rank}": -1}
    checkpoints.load(found)
    assert found == {"same": 1, f"own{rank}": rank}


def test_keys_that_are_numbers(tmp_path):
    given = {"steps": {1: "one", 2: {3: torch.ones(2), 4: 5}}, 7: [1, {8: "eight"}]}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(given, 1)
    found = {"steps": {1: "", 2: {3: torch.zeros(2), 4: 0}}, 7: [0, {8: ""}]}
    checkpoints.load(found)
    assert found["steps"][1] == "one"
    assert torch.equal(found["steps"][2][3], torch.ones(2))
    assert (found["steps"][2][4], found[7]) == (5, given[7])
    with pytest.raises(CheckpointError, match=r"the keys 1 and '1' of 'steps' have one name"):
        checkpoints.save({"steps": {1: 1, "1": 2}}, 2)
    assert checkpoints.newest() == 1
