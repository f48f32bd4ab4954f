"""Looks at what counts as the same on all ranks, as one rank sees them: the other's notes are written by hand."""

import contextlib
import json
import zlib
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from dtensor import AgreementError
from dtensor.comm import replication_check
from dtensor.comm.replication_check import EVERY, Given, Look, compare, is_due, note_taken, noted, numbers
from dtensor.job.groups import calls_on
from dtensor.mesh.provenance import LOCAL, TAKEN, Taken
from dtensor.testing import fake_ranks
from dtensor.torch_private.core import make_fx


class Here:
    """This rank's job, in a store that the test writes to for the others."""

    def __init__(self, rank=0, failures=0):
        self.store, self.rank, self.failures = dist.HashStore(), rank, failures

    def failing(self, said):
        return AgreementError(said)


@pytest.fixture(autouse=True)
def nothing_told():
    replication_check._told.clear()
    yield
    replication_check._told.clear()


def test_numbers_are_the_norm_and_sums_of_elements_in_steps():
    x = torch.arange(1.0, 9.0).reshape(2, 4)
    found = numbers(x)
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx([204**0.5, 36.0, 1 + 3 + 5 + 7, 1 + 4 + 7, 1 + 8])
    half = numbers(torch.full((4096,), 30.0, dtype=torch.float16))  # whose sum is no float16
    assert half.tolist()[:2] == pytest.approx([30.0 * 64, 30.0 * 4096], rel=1e-3)
    assert numbers(torch.tensor([0.1], dtype=torch.float64)).tolist() == [0.1] * 5  # no digits are lost


def test_numbers_of_complex_values_are_those_of_their_parts():
    x = torch.tensor([3 + 4j, 1 - 2j])
    assert numbers(x).tolist() == numbers(torch.tensor([3.0, 4.0, 1.0, -2.0])).tolist()


def test_integers_have_a_checksum_that_follows_their_order():
    weights = [1, 2654435762, 5308871523]
    assert numbers(torch.tensor([7, 5, 3])).tolist() == [7 * 1 + 5 * weights[1] + 3 * weights[2]]
    assert numbers(torch.tensor([True, False, True])).tolist() == [1 + weights[2]]
    big = [1 << 40, 1 << 41, 3]
    modulo = 1 << 50
    assert numbers(torch.tensor(big)).tolist() == [sum(n * w for n, w in zip(big, weights)) % modulo]
    assert numbers(torch.tensor([modulo + 5])).tolist() == [5.0]
    assert numbers(torch.tensor([modulo // 2 + 5])).tolist() == [modulo // 2 + 5]
    assert numbers(torch.tensor([], dtype=torch.int64)).tolist() == [0.0]


def looked(mine, theirs, place="3"):
    """What rank 0 hears that has `mine` where rank 1 has `theirs`: lists of (what is said, tensor)."""
    here = Here()
    there = Here(1)
    there.store = here.store
    calls = SimpleNamespace(name="g", ranks=(0, 1))
    other = Look(there, calls, place, [Given(*given) for given in theirs])
    other.tell()
    look = Look(here, calls, place, [Given(*given) for given in mine])
    look.tell()
    look.hear()
    return look


X = torch.tensor([3.0, -4.0])


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (X, X),
        (X, X * 1.052),  # norms 5 and 5.26, and 0.05 of the larger of them
        (X * 1.052, X),
        (X * torch.nan, X * torch.nan),
        (torch.tensor([1.0, torch.inf]), torch.tensor([1.0, torch.inf])),
        (torch.tensor([5, 6]), torch.tensor([5, 6])),
        (X[:0], X[:0]),
    ],
)
def test_the_same_but_for_rounding(mine, theirs):
    looked([("an input", mine)], [("an input", theirs)])


@pytest.mark.parametrize(
    ("mine", "theirs", "expected"),
    [
        (X, X * 1.054, "in the values of a torch.float32 [2]"),
        (X * 1.054, X, "in the values of a torch.float32 [2]"),
        (X, X.flip(0), "in the values of a torch.float32 [2]"),
        (X, X * torch.nan, "in the values of a torch.float32 [2]"),
        (X * torch.nan, X, "in the values of a torch.float32 [2]"),
        (torch.tensor([5, 6]), torch.tensor([6, 5]), "in the values of a torch.int64 [2]"),
        (torch.tensor([1000]), torch.tensor([1001]), "in the values of a torch.int64 [1]"),
        (X, X.double(), "in torch.float32 [2] and torch.float64 [2]"),
        (X, X[None], "in torch.float32 [1, 2] and torch.float32 [2]"),
    ],
)
def test_what_differs_is_said(mine, theirs, expected):
    with pytest.raises(AgreementError) as raised:
        looked([("an input", X), ("of a layer", mine)], [("an input", X), ("of a layer", theirs)])
    assert str(raised.value) == f"ranks 0 and 1 differ {expected} of a layer"


def test_what_another_graph_looks_at_is_not_compared():
    looked([("an input", X)], [("another", X + 7)])
    looked([("another", X)], [("an input", X + 7)])
    looked([("an input", X)], [("an input", X), ("another", X)])


def test_a_difference_of_just_the_tolerance_is_none():
    here = Here()
    look = Look(here, SimpleNamespace(name="g", ranks=(0, 1)), "3", [Given("x", torch.tensor([20.0]))])
    look.tell()
    for norm, differs in ((19.0, False), (21.0, False), (18.999, True)):
        here.store.set(f"{look.prefix}/1", json.dumps([["x", "torch.float32", [1], [norm, *[20.0] * 4]]]))
        with pytest.raises(AgreementError) if differs else contextlib.nullcontext():
            look.hear()


def test_every_other_rank_that_has_told_is_heard():
    here = Here(1)
    calls = SimpleNamespace(name="g", ranks=(0, 1, 2, 3))
    for rank, x in ((0, None), (2, X), (3, 2 * X)):
        if x is not None:
            there = Here(rank)
            there.store = here.store
            Look(there, calls, "3", [Given("x", x)]).tell()
    look = Look(here, calls, "3", [Given("x", X)])
    look.tell()
    with pytest.raises(AgreementError, match="ranks 1 and 3 differ in the values"):
        look.hear()
    # A rank that runs another graph at that place keeps nobody from hearing the next one.
    there = Here(0)
    there.store = here.store
    Look(there, calls, "3", [Given("other", X)]).tell()
    with pytest.raises(AgreementError, match="ranks 1 and 3 differ in the values"):
        look.hear()


def test_a_note_stands_under_the_group_the_failures_and_the_place():
    here = Here(rank=2, failures=4)
    Look(here, SimpleNamespace(name="g", ranks=(2,)), "17", [Given("x", X)]).tell()
    note = json.loads(here.store.get("dtensor/alike/g/4/17/2"))
    assert note == [["x", "torch.float32", [2], pytest.approx([5.0, -1.0, 3.0, 3.0, 3.0])]]


def test_old_notes_leave_the_store(monkeypatch):
    monkeypatch.setattr(replication_check, "KEPT", 3)
    here, calls = Here(), SimpleNamespace(name="g", ranks=(0, 1))
    for place in range(5):
        Look(here, calls, str(place), [Given("x", X)]).tell()
    assert [here.store.check([f"dtensor/alike/g/0/{place}/0"]) for place in range(5)] == [
        False,
        False,
        True,
        True,
        True,
    ]


def test_the_store_of_a_job_that_has_ended_is_left_alone(monkeypatch):
    """The file behind it may be gone, for which torch waits."""
    monkeypatch.setattr(replication_check, "KEPT", 1)
    calls = SimpleNamespace(name="g", ranks=(0, 1))
    before, now = Here(), Here()
    for job, places in ((before, "ab"), (now, "cd")):
        for place in places:
            Look(job, calls, place, [Given("x", X)]).tell()
    assert [before.store.check([f"dtensor/alike/g/0/{place}/0"]) for place in "ab"] == [False, True]
    assert [now.store.check([f"dtensor/alike/g/0/{place}/0"]) for place in "cd"] == [False, True]


def test_which_uses_are_looked_at():
    assert [uses for uses in range(2 * EVERY + 1) if is_due(uses)] == [0, 1, EVERY, 2 * EVERY]


@pytest.fixture
def eager(monkeypatch):
    """Rank 0 of 2 with a job of its own."""
    here = Here()
    monkeypatch.setattr(replication_check, "job", lambda: here)
    with fake_ranks(2):
        yield here, dist.group.WORLD


def test_eager_comparisons_have_a_place_each_whether_due_or_not(eager):
    here, group = eager
    prefix = f"dtensor/alike/{group.group_name}/0/eager "
    for place, due in enumerate((True, False, True)):
        compare("x", X, group.group_name, due)
        assert calls_on(group).taken == place + 1
        assert here.store.check([f"{prefix}{place}/0"]) is due
    here.store.set(f"{prefix}3/1", json.dumps([["x", "torch.float32", [2], [9.0] * 5]]))
    with pytest.raises(AgreementError, match=r"ranks 0 and 1 differ in the values of a torch.float32 \[2\] x"):
        compare("x", X, group.group_name, True)


def test_eager_comparisons_that_are_none(eager):
    """Of what needs a gradient, of which each rank has a part; over one rank; without a job; and within a trace."""
    here, group = eager
    name = group.group_name
    told = f"dtensor/alike/{name}/0/eager"
    compare("x", X.clone().requires_grad_(), name, True)
    assert calls_on(group).taken == 1
    assert not here.store.check([f"{told} 0/0"])
    alone = dist.new_group([0])
    compare("x", X, alone.group_name, True)
    assert calls_on(alone).taken == 1
    assert not here.store.check([f"dtensor/alike/{alone.group_name}/0/eager 0/0"])
    for mode in ("real", "fake"):
        make_fx(lambda x: (compare("x", x, name, True), x + 1)[1], tracing_mode=mode)(X)
    with torch._subclasses.FakeTensorMode() as fake:
        compare("x", fake.from_tensor(X), name, True)
    assert calls_on(group).taken == 1
    assert not here.store.check([f"{told} 1/0"])


@contextlib.contextmanager
def compiling(monkeypatch):
    class Context:
        """What is compiled."""

    context = Context()
    with monkeypatch.context() as patch:
        patch.setattr(replication_check, "compile_context", lambda: context)
        yield


def test_inputs_of_a_graph_are_noted(monkeypatch):
    """Back to the inputs, but not past what was noted before, what is a local tensor, or what other ranks sent."""

    def f(a, b, c, d, e):
        local = c + 1
        replication_check.graph_node(local).meta[LOCAL] = True
        sent = torch.ops._c10d_functional.wait_tensor(d)
        x = (a * 2) @ b + local + sent
        note_taken(x, ["g", "h"], "the input of {}")
        y = x * e
        note_taken(y, ["i"], "again {}")
        return y

    with compiling(monkeypatch):
        gm = make_fx(f)(*[torch.ones(2, 2) for _ in range(5)])
        assert noted() == ("g", "h", "i")
    assert noted() == ()
    first = Taken("the input of {}", ("g", "h"), {}, "")
    nodes = list(gm.graph.nodes)
    inputs = [n.meta.get(TAKEN) for n in nodes if n.op == "placeholder"]
    assert [x and (x.said, x.groups) for x in inputs] == [
        (first.said, first.groups),
        (first.said, first.groups),
        None,
        None,
        ("again {}", ("i",)),
    ]
    by_name = {n.target: n.meta.get(TAKEN) for n in nodes if n.op == "call_function"}
    assert by_name[torch.ops._c10d_functional.wait_tensor.default] is None
    assert by_name[torch.ops.aten.mm.default].groups == ("g", "h")


def test_where_it_was_taken_is_noted(monkeypatch):
    meta = {"nn_module_stack": {"a": ("layer", None)}, "stack_trace": "in a file"}
    monkeypatch.setattr(replication_check.fx_traceback, "current_meta", meta)

    def f(a):
        note_taken(a * 2, ["g"], "x")
        return a

    (a, *_) = make_fx(f)(X).graph.nodes
    assert a.meta[TAKEN] == Taken("x", ("g",), meta["nn_module_stack"], "in a file")


def test_outside_of_a_trace_nothing_is_noted(monkeypatch):
    with compiling(monkeypatch):
        note_taken(X, ["g"], "x")
        assert noted() == ()
    assert noted() == ()


def test_without_a_compilation_inputs_are_noted_all_the_same():
    def f(a):
        note_taken(a * 2, ["g"], "x")
        return a

    (a, *_) = make_fx(f)(X).graph.nodes
    assert a.meta[TAKEN].groups == ("g",)
    assert noted() == ()


def test_the_state_of_a_generator_is_a_checksum():
    with torch.random.fork_rng():
        torch.manual_seed(3)
        (found,) = torch.ops.dtensor.generator_state(torch.device("cpu")).tolist()
        assert found == zlib.crc32(bytes(torch.get_rng_state().numpy()))
        torch.rand(1)
        assert torch.ops.dtensor.generator_state(torch.device("cpu")).tolist() != [found]
