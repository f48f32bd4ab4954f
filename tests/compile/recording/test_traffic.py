"""The manifest against what really goes through the process group: a gloo group that writes down what it is handed."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

import dtensor.compile
from dtensor.compile.recording.folder import rank_folder
from dtensor.testing import run_ranks
from dtensor.tools import demo

SENT: list[tuple[str, int]] = []
"""Collective and bytes that this rank handed over, in order."""


def counted(op, name):
    """A method of a process group that writes down its input and calls gloo's of that name."""

    def method(self, *args):
        given = args[0] if op in ("all_reduce", "broadcast", "send") else args[1]
        SENT.append((op, sum(t.nbytes for t in (given if isinstance(given, (list, tuple)) else [given]))))
        return getattr(self.inner, name)(*args)

    return method


def one_of(method):
    """`method` for lists of one tensor, as functional collectives give them."""

    def coalesced(self, outputs, inputs, *args):
        (output,), (given,) = outputs, inputs
        return method(self, output, given)

    return coalesced


class CountedGroup(dist.ProcessGroup):
    """Gloo, and a note of all that passes."""

    def __init__(self, inner, rank, size):
        super().__init__(rank, size)
        self.inner = inner

    def getBackendName(self):
        return "counted-gloo"

    def barrier(self, *args, **options):
        return self.inner.barrier(*args, **options)

    @property
    def pg_name(self):
        return _world.pg_names[self]

    @property
    def group_name(self):
        return _world.pg_names[self]

    allreduce = counted("all_reduce", "allreduce")  # pyright: ignore
    broadcast = counted("broadcast", "broadcast")  # pyright: ignore
    all_gather_single = counted("all_gather", "_allgather_base")  # pyright: ignore
    all_gather_single_coalesced = one_of(all_gather_single)  # pyright: ignore
    reduce_scatter_single = counted("reduce_scatter", "_reduce_scatter_base")  # pyright: ignore
    reduce_scatter_single_coalesced = one_of(reduce_scatter_single)  # pyright: ignore
    all_to_all_single = counted("all_to_all", "alltoall_base")  # pyright: ignore
    send = counted("send", "send")  # pyright: ignore

    def recv(self, *args):
        return self.inner.recv(*args)


def counted_world(rank, size, folder):
    """A default process group that counts, in place of the one that is there, once all ranks have that."""
    dist.barrier()
    dist.destroy_process_group()
    dist.Backend.register_backend(
        "counted-gloo",
        lambda store, rank, size, timeout: CountedGroup(dist.ProcessGroupGloo(store, rank, size, timeout), rank, size),
        devices=["cpu"],
    )
    dist.init_process_group("counted-gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)


def train(rank, plan, nproc, folder):
    """Compile one step of the demo, and run another one: what the second sends, and the manifest."""
    counted_world(rank, nproc, folder)
    chosen = demo.PLANS[plan]
    mesh = demo.init_device_mesh("cpu", chosen.mesh_shape(nproc), mesh_dim_names=chosen.axes)
    torch.manual_seed(0)
    args = demo.ModelArgs(1, demo.VOCAB, demo.SEQ, demo.DIM, demo.HEADS, dropout_p=0.0, weight_tying=False)
    model = chosen.apply(demo.Transformer(args), mesh, torch.float32)
    options = {"inner": "aot_eager", "agreement": False}  # the agreement asks gloo how long it may take
    step = demo.loss_of(model, wrap=lambda fn: torch.compile(fn, backend="dtensor", fullgraph=True, options=options))
    batch = torch.zeros(demo.BATCH, demo.SEQ, dtype=torch.long)
    with dtensor.compile.dump(f"{folder}/dump"):
        step.loss(batch, batch).backward()
    SENT.clear()
    loss = step.loss(batch, batch)
    forward = list(SENT)
    loss.backward()
    (path,) = rank_folder(Path(f"{folder}/dump")).glob("*/manifest.json")
    return forward, SENT[len(forward) :], json.loads(path.read_text())


BY_DAY = ("sp",)


@pytest.mark.parametrize("plan", [p if p in BY_DAY else pytest.param(p, marks=pytest.mark.nightly) for p in demo.PLANS])
def test_the_manifest_of_the_demo_is_what_goes_through_the_process_group(plan, tmp_path):
    nproc = 4 if max(demo.PLANS[plan].mesh_shape(4)) == 2 else 2  # groups of two
    for forward, backward, manifest in run_ranks(train, nproc, plan, nproc, str(tmp_path)):
        for direction, found in (("forward", forward), ("backward", backward)):
            listed = [c for c in manifest["collectives"] if c["direction"] == direction]
            # In groups of two all but a sum is one message. A ring sends as many bytes of it as it has.
            assert found == [(c["carried"] if c["op"] == "all_reduce" else "send", c["bytes"]) for c in listed]
            assert {c["carried"] for c in listed} <= {"all_reduce", "all_gather", "all_to_all"}
            assert (direction in manifest["totals"]) == bool(listed)
            if not listed:
                continue
            total = manifest["totals"][direction]
            assert total["count"] == dict(Counter(c["op"] for c in listed))
            assert total["bytes"] == sum(n for _, n in found)
            # What is handed over: all of a tensor whose parts go to the ranks, of which one stays here.
            assert total["sent"] == sum(
                n * (2 if c["carried"] == "all_to_all" else 1) for (_, n), c in zip(found, listed)
            )
