"""Simulated ranks: values, lines and errors of real processes. All tests share two ranks, unless they end them."""

import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dtensor
from dtensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from dtensor.testing import PerRank, RankError, Ranks, with_threads

CELL = """
from torch import nn

import dtensor
from dtensor import Shard, distribute_tensor, init_device_mesh

mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
"""


@pytest.fixture(scope="module")
def ranks():
    with dtensor.simulate(2) as made:
        made.cell("import torch")
        yield made


def test_values_of_cells(ranks):
    assert len(ranks) == 2
    assert repr(ranks) == "2 simulated ranks"
    assert ranks.cell(CELL) is None
    assert repr(ranks.cell("x.to_local()")) == "rank 0: tensor([0., 1.])\nrank 1: tensor([2., 3.])"
    assert repr(ranks.cell("x.shape")) == "ranks 0, 1: torch.Size([4])"
    assert ranks.cell("None if mesh.get_rank() == 1 else 3")[1] is None
    ranks.cell("total = x.sum().item()")
    assert ranks["total"] == [6.0, 6.0]


FUNCTION = """
def local(more):
    print("from", mesh.get_rank())
    return x.to_local() * factor + more
"""


def test_functions_see_what_cells_defined(ranks, capsys):
    """And take the globals along that are defined here."""
    ranks.cell(CELL)
    notebook: dict[str, Any] = {"factor": 3, "__name__": "__main__"}
    exec(FUNCTION, notebook)
    got = ranks.run(notebook["local"], more=1)
    assert isinstance(got, PerRank)
    assert [value.tolist() for value in got] == [[1.0, 4.0], [7.0, 10.0]]
    assert capsys.readouterr().out == "rank 0: from 0\nrank 1: from 1\n"


def train(backend, options=None):
    """Losses of two steps."""
    mesh = dtensor.init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 4))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    compiled = torch.compile(model, backend=backend, fullgraph=True, options=options)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(2):
        loss = compiled(torch.ones(2, 4)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def one_device():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 4))
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(2):
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


COMPILERS = {
    "eager": ("eager",),
    "aot_eager": ("aot_eager",),
    "dtensor": ("dtensor", {"inner": "aot_eager"}),
}


@pytest.mark.parametrize("how", COMPILERS)
def test_compiled_code(ranks, how):
    for losses in ranks.run(train, *COMPILERS[how]):
        assert losses == pytest.approx(one_device(), abs=1e-6)


@pytest.mark.nightly
@pytest.mark.parametrize("how", [("inductor",), ("dtensor",)])
def test_compiled_by_inductor(ranks, how):
    for losses in ranks.run(train, *how):
        assert losses == pytest.approx(one_device(), abs=1e-6)


def test_what_ranks_print_is_printed_here(ranks, capsys):
    ranks.cell("import os, sys, torch.distributed as dist\nprint('hello')\nprint('part', dist.get_rank(), end='')")
    ranks.cell("print('oh', file=sys.stderr); os.write(1, b'written\\n'); None")
    printed = capsys.readouterr()
    assert printed.out == "ranks 0, 1: hello\nrank 0: part 0\nrank 1: part 1\nranks 0, 1: written\n"
    assert printed.err == "ranks 0, 1: oh\n"


def pid():
    return os.getpid()


def refused(what):
    if what == "alike":
        raise ValueError("no")
    if what == "inside":
        torch.ones(2) @ torch.ones(3)
    if what == "unsendable":
        return threading.Lock()
    return dtensor.ones(4, device_mesh=dtensor.init_device_mesh("cpu", (2,)))


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("alike", "all 2 ranks failed in the same place; rank 0:\nTraceback.*raise ValueError.*ValueError: no$"),
        ("inside", "torch.ones\\(2\\) @ torch.ones\\(3\\).*size mismatch|inconsistent tensor size"),
        ("unsendable", "a lock cannot be sent from the ranks.*return tensors, numbers or text"),
        ("a DTensor", "a DTensor lives on the ranks; return x.full_tensor"),
    ],
)
def test_ranks_that_fail_in_the_same_place_live_on(ranks, what, said):
    before = ranks.run(pid)
    with pytest.raises(RankError, match=f"(?s){said}") as error:
        ranks.run(refused, what)
    assert "dtensor/testing/simulation" not in str(error.value)
    assert error.value._render_traceback_() == [f"RankError: {error.value}"]
    assert ranks.run(pid) == before


def test_errors_of_cells(ranks):
    with pytest.raises(RankError, match=r'File "cell-\d+.py", line 2\n *1 = 2\n.*\n*SyntaxError: cannot assign'):
        ranks.cell("\n1 = 2")
    with pytest.raises(RankError, match=r'(?s)File "cell-\d+.py", line 3, in f\n    return y.*NameError'):
        ranks.cell("f = None\ndef f():\n    return y\nf()")
    with pytest.raises(RankError, match="the ranks have no variable 'nothing'; define it in a cell"):
        ranks["nothing"]


def test_what_cannot_be_read_here(ranks):
    ranks.cell("class Mine: pass\nmine = Mine()")
    with pytest.raises(TypeError, match=r"the variable 'mine' gives cannot be read here: AttributeError.*Mine"):
        ranks["mine"]


def alone(how):
    mesh = dtensor.init_device_mesh("cpu", (2,))
    if how == "raises" and mesh.get_rank() == 1:
        raise ValueError("only here")
    if how == "dies" and mesh.get_rank() == 1:
        os._exit(7)
    if how == "returns early" and mesh.get_rank() == 1:
        return
    if how == "returns early, plain" and mesh.get_rank() == 0:
        return
    if how == "returns early, plain":
        dist.barrier()
    if how != "sleeps":
        dtensor.ones(4, device_mesh=mesh, placements=[dtensor.Shard(0)]).full_tensor()
    time.sleep(100)


ALONE = {
    "raises": ("rank 1 of 2 failed:.*ValueError: only here\nThe ranks have been ended", RankError, 600),
    "dies": ("rank 1 of 2 failed:\nits process ended with exit code 7", RankError, 600),
    "returns early": (
        "rank 0 of 2 failed.*rank 0 waits in all_gather.*test_simulate.py.*rank 1 waits in the end of this call",
        RankError,
        600,
    ),
    "returns early, plain": ("rank 0 waits in the end of .*rank 1 waits in torch.distributed.barrier", RankError, 600),
    "sleeps": (r"alone was not done on all ranks after 4 s.*rank 0 is in:.*in alone.*been ended", TimeoutError, 4),
}


@pytest.mark.parametrize("how", ["raises", *[pytest.param(how, marks=pytest.mark.nightly) for how in [*ALONE][1:]]])
def test_a_rank_that_fails_alone_ends_all_and_nobody_hangs(how):
    said, kind, timeout = ALONE[how]
    with dtensor.simulate(2, timeout=timeout) as ranks:
        before, begun = ranks.run(pid), time.monotonic()
        with pytest.raises(kind, match=f"(?s){said}"):
            ranks.run(alone, how)
        assert time.monotonic() - begun < 60
        after = ranks.run(pid)
        assert not set(before) & set(after)
    with pytest.raises(ProcessLookupError):
        os.kill(after[0], 0)


@pytest.mark.nightly
def test_an_interrupt_ends_them():
    with dtensor.simulate(2) as ranks:
        before = ranks.run(pid)
        threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt) as interrupt:
            ranks.run(time.sleep, 100)
        assert "The ranks have been ended" in interrupt.value.__notes__[0]
        assert not set(before) & set(ranks.run(pid))


SCRIPT = """
import dtensor
ranks = dtensor.simulate(2)
print("once")
class Value:
    def __init__(self, value): self.value = value
def work(): return Value(3)
print([x.value for x in ranks.run(work)])
"""


@pytest.mark.nightly
def test_a_script_needs_no_guard_and_ends(tmp_path):
    (tmp_path / "first.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(tmp_path / "first.py")], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "once\n[3, 3]\n", "")


def test_what_is_no_number_of_ranks():
    for wrong in (0, -1, 2.0, "2"):
        with pytest.raises(ValueError, match="simulate takes a number of ranks"):
            dtensor.simulate(wrong)
    with pytest.raises(ValueError, match="timeout must be a positive number"):
        dtensor.simulate(2, timeout=0)


@with_threads(1)
def test_a_rank_starts_no_others(rank):
    with pytest.raises(RuntimeError, match="this process is a rank"):
        dtensor.simulate(2)


def test_ranks_are_not_sent_to_ranks(ranks):
    with pytest.raises(TypeError, match="simulated ranks are not there on the ranks themselves"):
        ranks.run(len, ranks)
    with pytest.raises(TypeError):
        list(ranks)
    assert isinstance(ranks, Ranks)
