"""Layouts decided for a whole compiled graph: what it sends, its values, what it does where a program is another one,
and what is said of it."""

import math
import os
import subprocess
import sys
import warnings
from collections import Counter
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dtensor import Shard, distribute_model, distribute_tensor, init_device_mesh
from dtensor.compile.recording import frames
from dtensor.dispatch.whole_graph import LOST, Following, OperatorLayouts, followed
from dtensor.parallel import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module
from dtensor.parallel.decisions import deciding
from dtensor.parallel.decisions import frames as frames_of_decisions
from dtensor.parallel.decisions.frames import Trace
from dtensor.parallel.search.steps import pattern
from dtensor.parallel.search.tape import BORDER, PARAMETER
from dtensor.testing import fake_ranks, run_ranks

WIDTH, HEADS = 16, 4
COLUMNS, ROWS = {"tp": Shard(0)}, {"tp": Shard(1)}
PLAN = {"*.[qkv].weight": COLUMNS, "*.o.weight": ROWS, "*.up.weight": COLUMNS, "*.down.weight": ROWS}
AOT = {"inner": "aot_eager"}
QUIET = {"check_inputs": False, "outputs": {}}


class Block(nn.Module):
    """A block of a decoder."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        q, k, v = (w(y).unflatten(-1, (-1, x.shape[-1] // HEADS)).transpose(1, 2) for w in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Decoder(nn.Module):
    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width) for _ in range(blocks)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def decoder(blocks: int = 2, width: int = WIDTH) -> Decoder:
    torch.manual_seed(0)
    return Decoder(blocks, width)


def batch(n: int = 4, tokens: int = 32, width: int = WIDTH) -> torch.Tensor:
    return torch.linspace(-1, 1, n * tokens * width).sin().view(n, tokens, width)


def step(model: nn.Module, x: torch.Tensor, **options) -> Counter:
    """Take a compiled step; return the bytes that it sends by collective, forward and backward."""
    torch.compiler.reset()
    torch.compile(model, backend="dtensor", options=AOT | options)(x).square().mean().backward()
    sent = [c.sent for story in frames.recent_frames()[-1].stories.values() for c in story.sent]
    return sum([Counter({s.op: s.bytes}) for s in sent], Counter())


def by_hand(model: Decoder, mesh) -> nn.Module:
    plan = {f"blocks.*.{name}": ColwiseParallel() for name in ("q", "k", "v", "up")}
    return parallelize_module(model, mesh, plan | {f"blocks.*.{name}": RowwiseParallel() for name in ("o", "down")})


def test_an_unmodified_model_sends_no_more_than_by_hand():
    """Of the bytes by hand: forward and backward, and by one operator after the other more than that."""
    width, x = 256, batch(8, 128, 256)
    with fake_ranks(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        hand = step(by_hand(decoder(2, width), mesh), x).total()
        whole = distribute_model(decoder(2, width), mesh, PLAN, check_inputs=False, outputs={})
        decided, greedy = step(whole, x).total(), step(whole, x, decide=False).total()
    assert decided < hand < greedy


def reference(x: torch.Tensor, blocks: int = 2) -> list[torch.Tensor | None]:
    model = decoder(blocks)
    out = model(x)
    out.square().mean().backward()
    return [out.detach(), *[p.grad for p in model.parameters()]]


def compared(model: nn.Module, run, sizes) -> None:
    for size in sizes:
        x = batch(*size)
        model.zero_grad()
        out = run(x)
        out.square().mean().backward()
        found = [out.detach(), *[p.grad for p in model.parameters()]]
        for one, other in zip(found, reference(x, len(model.blocks)), strict=True):
            whole = one.full_tensor() if hasattr(one, "full_tensor") else one
            torch.testing.assert_close(whole, other, rtol=1e-4, atol=1e-6)


SIZES = [(4, 8), (3, 5), (4, 8)]


PROGRAMS = [(True, PLAN), (False, {"*.o.weight": COLUMNS, "*.q.*": ROWS}), (False, PLAN), (True, {})]
"""Whether sizes are dynamic, and a plan."""


def values(rank: int, programs: slice, blocks: int) -> int:
    """On two ranks: static and dynamic sizes, those that ranks divide and those that they do not."""
    mesh, most = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), 0
    for dynamic, plan in PROGRAMS[programs]:
        torch.compiler.reset()
        model = distribute_model(decoder(blocks), mesh, plan, outputs={})
        compared(model, torch.compile(model, backend="dtensor", options=AOT, dynamic=dynamic), SIZES)
        told = [f.decided for f in frames.recent_frames() if f.decided is not None]
        assert told
        assert not any(t.why or t.missed for t in told)
        most = max(most, told[-1].operators)
    return most


def on_two_axes(rank: int) -> int:
    """Over two axes at once, and beside `fully_shard`, where parameters are on a mesh of all axes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.compiler.reset()
    model = distribute_model(decoder(), mesh, PLAN, inputs={"dp": Shard(0)}, outputs={})
    part = rank // 2
    x = batch(4, 8)
    out = torch.compile(model, backend="dtensor", options=AOT)(x[2 * part : 2 * part + 2])
    torch.testing.assert_close(out.detach(), reference(x)[0], rtol=1e-4, atol=1e-6)
    torch.compiler.reset()
    model = distribute_model(decoder(), mesh["tp"], PLAN, outputs={})
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    compared(model, torch.compile(model, backend="dtensor", options=AOT), [(4, 8)])
    return frames.recent_frames()[-1].decided.operators


@pytest.mark.parametrize(
    ("programs", "blocks"), [(slice(1), 1), pytest.param(slice(4), 2, marks=pytest.mark.nightly, id="all")]
)
def test_values_on_two_ranks(programs, blocks):
    assert run_ranks(values, 2, programs, blocks, timeout=600)[0] > 50 * blocks


@pytest.mark.nightly
def test_values_on_two_axes():
    assert run_ranks(on_two_axes, 4, timeout=600)[0] > 100


IN_ANOTHER = """
from tests.parallel.decisions import test_decisions as t

print(t.decided({shape}, {names}))
"""


def decided(shape: tuple[int, ...], names: tuple[str, ...]) -> str:
    """What is decided for a block: each operator, and the layouts of its operands and outputs."""
    told: list[str] = []
    own = frames_of_decisions.decide

    def decide(recording, folder):
        made = own(recording)
        told.append(str([(str(x.func), x.inputs, x.outputs) for x in made.layouts]))
        return made

    torch.compiler.reset()
    with mock.patch.object(frames_of_decisions, "decide", decide), fake_ranks(math.prod(shape)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        step(distribute_model(decoder(1), mesh, PLAN, outputs={}), batch())
    (text,) = told
    return text


@pytest.mark.nightly
@pytest.mark.parametrize(("shape", "names"), [((2,), ("tp",)), ((2, 2), ("dp", "tp"))])
def test_decisions_are_the_same_in_every_process(shape, names):
    """Also where sets and dicts of strings have another order."""
    env = os.environ | {"PYTHONHASHSEED": "1", "DTENSOR_PROGRESS": "0"}
    program = IN_ANOTHER.format(shape=shape, names=names)
    found = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert found.returncode == 0, found.stderr[-2000:]
    here = decided(shape, names)
    assert here.startswith("[('aten.")
    assert found.stdout.strip() == here


def test_a_program_that_is_another_chooses_for_itself():
    """Operators follow in order; those that were not recorded choose, and those left out are passed over."""
    with fake_ranks(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
        aten = torch.ops.aten
        decided = [
            OperatorLayouts(aten.relu.default, (2,), ((1,),), ((1,),)),
            OperatorLayouts(aten.exp.default, (2,), ((None,),), ((None,),)),
            OperatorLayouts(aten.neg.default, (2,), ((1,),), ((1,),)),
        ]
        following = Following(decided, mesh)
        with followed(following):
            assert x.relu().placements == (Shard(1),)
            assert x.sin().placements == (Shard(0),)
            assert x.neg().placements == (Shard(1),)
            assert x.exp().placements == (Shard(0),)  # that was before
        assert following.missed == ["aten.sin.default", "aten.exp.default"]
        assert x.relu().placements == (Shard(0),)


def test_a_program_that_is_far_from_what_was_recorded_does_not_follow():
    with fake_ranks(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
        aten = torch.ops.aten
        other = OperatorLayouts(aten.exp.default, (2,), ((1,),), ((1,),))
        relu = OperatorLayouts(aten.relu.default, (2,), ((1,),), ((1,),))
        with followed(Following([relu, *[other] * LOST, relu, relu], mesh)):
            assert [x.relu().placements for _ in range(3)] == [(Shard(1),)] * 3
        with followed(Following([relu, *[other] * (LOST + 1), relu, relu], mesh)):
            assert [x.relu().placements for _ in range(3)] == [(Shard(1),), (Shard(1),), (Shard(0),)]


@pytest.mark.nightly
def test_without_gradients_no_backward_is_decided():
    with fake_ranks(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = distribute_model(decoder(), mesh, PLAN, check_inputs=False, outputs={})
        torch.compiler.reset()
        run = torch.compile(model, backend="dtensor", options=AOT)
        run(batch()).sum().backward()
        trained = frames.recent_frames()[-1].decided
        with torch.no_grad():
            run(batch())
        told = frames.recent_frames()[-1].decided
    assert told.missed == trained.missed == 0
    assert told.operators < trained.operators / 2


class Counted(Decoder):
    """A decoder with a statistic."""

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__(blocks, width)
        self.register_buffer("seen", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.mul_(0.9).add_(x.mean((0, 1)))
        return super().forward(x)


class Checkpointed(Decoder):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


@pytest.mark.parametrize("kind", [Checkpointed, Counted])
def test_all_operators_of_a_trace_are_found(kind):
    """Also where the trace has more of them than the program: activation checkpointing detaches all that is made, and
    buffers are written at the end."""
    with fake_ranks(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = distribute_model(kind(2, WIDTH), mesh, PLAN, check_inputs=False)
        step(model, batch())
        told = frames.recent_frames()[-1].decided
    assert told.operators > 100
    assert told.missed == 0


def test_a_graph_that_is_another_is_said_once(monkeypatch):
    own = frames_of_decisions.decide
    monkeypatch.setattr(
        frames_of_decisions, "decide", lambda *args: replace(made := own(*args), layouts=made.layouts[:20])
    )
    with fake_ranks(2), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        step(distribute_model(decoder(1), mesh, PLAN, check_inputs=False), batch())
    (one,) = [str(w.message) for w in said if "are not those that were recorded" in str(w.message)]
    assert "from aten." in one
    assert frames.recent_frames()[-1].decided.missed > 20


def test_a_second_trace_returns_what_the_first_one_said():
    """Whatever layouts its operators come to."""
    with fake_ranks(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
        relu = OperatorLayouts(torch.ops.aten.relu.default, (2,), ((1,),), ((1,),))
        following = Following([relu], mesh)
        trace = Trace(following)
        with trace.context():
            assert trace.run(lambda y: [y.relu(), 1], x)[0].placements == (Shard(1),)
        following.decided = []
        with pytest.warns(UserWarning, match=r"1 operators .* from aten.relu"), trace.context():
            out, one = trace.run(lambda y: [y.relu(), 1], x)
        assert out.placements == (Shard(1),)
        assert one == 1
        assert following.missed == ["aten.relu.default"]


def test_layouts_that_a_rule_does_not_allow_are_not_taken():
    with fake_ranks(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
        wrong = OperatorLayouts(torch.ops.aten.softmax.int, (2,), ((1,),), ((1,),))
        relu = OperatorLayouts(torch.ops.aten.relu.default, (2,), (("sum",),), (("sum",),))
        with followed(Following([wrong, relu], mesh)):
            assert x.relu().placements == (Shard(0),)


class Reads(nn.Module):
    """A forward that needs the value of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.w
        return y[y.sum(1) > 0] * 2


def test_what_cannot_be_recorded_is_said():
    with fake_ranks(2), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = distribute_model(Reads(), mesh, {"w": {"tp": Shard(1)}}, check_inputs=False)
        torch.compiler.reset()
        torch.compile(model, backend="dtensor", options=AOT)(torch.ones(4, 4))
        told = [f.decided.why for f in frames.recent_frames() if f.decided is not None]
    assert "depends on values" in told[-1]


@pytest.mark.parametrize("by", ["nobody", "option", "environment", "plainly"])
def test_it_can_be_turned_off(by, monkeypatch):
    given = {"backend": "aot_eager"} if by == "plainly" else {"backend": "dtensor", "options": AOT}
    if by == "option":
        given["options"] = AOT | {"decide": False}
    elif by != "nobody":
        monkeypatch.setenv("DTENSOR_DECIDE", "0")
    with fake_ranks(2), mock.patch.object(frames_of_decisions, "decided", wraps=frames_of_decisions.decided) as decided:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = distribute_model(decoder(1), mesh, PLAN, check_inputs=False)
        torch.compiler.reset()
        torch.compile(model, **given)(batch())
    assert decided.called == (by == "nobody")


def test_layers_that_are_alike_are_decided_alike(monkeypatch):
    """Operators of layers have the same layouts; parameters of one shape that are cut otherwise are two things."""
    monkeypatch.setattr(deciding, "MANY", 0)
    with fake_ranks(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        with mock.patch.object(frames_of_decisions, "decide", wraps=deciding.decide) as decide:
            step(distribute_model(decoder(3, 256), mesh, PLAN, **QUIET), batch(8, 128, 256))
        recording = decide.call_args.args[0]
        decided = deciding.decide(recording)
        parameters = [t for t in deciding.steps_of(recording.tape).tensors if t.kind == PARAMETER]
    assert [t.count for t in parameters] == [3] * 10
    numbers, layouts = Counter(), {}
    operators = [op for op in recording.tape.ops if op.func != BORDER]
    for op, made in zip(operators, decided.layouts, strict=True):
        if not op.backward and op.path:
            layouts.setdefault((pattern(op.path), numbers[op.path]), []).append((op.func, made.inputs, made.outputs))
            numbers[op.path] += 1
    assert {len(of_layers) for of_layers in layouts.values()} == {3}
    for of_layers in layouts.values():
        assert of_layers == of_layers[:1] * len(of_layers)


def test_layers_that_are_cut_otherwise_are_decided_each():
    with fake_ranks(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = distribute_model(decoder(2), mesh, {"blocks.0.up.weight": COLUMNS, "blocks.1.up.weight": ROWS})
        with mock.patch.object(deciding, "steps_of", wraps=deciding.steps_of) as steps:
            step(model, batch())
    assert [call.kwargs.get("alike", True) for call in steps.call_args_list] == [True, False]


@pytest.mark.nightly
def test_layers_are_not_decided_alike_where_that_costs():
    """Here it costs 5 %."""
    with fake_ranks(2), mock.patch.object(deciding, "_solution", wraps=deciding._solution) as solved:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        step(distribute_model(decoder(2, 256), mesh, PLAN, **QUIET), batch(8, 128, 256))
        recording, choices, _ = solved.call_args.args
        alike, each = (
            deciding._solution(recording, choices, deciding.steps_of(recording.tape, alike=a)) for a in (True, False)
        )
        assert alike[2] > 1.03 * each[2]
        assert deciding._solved(recording, choices) == each[1:]


def test_a_move_of_layers_that_are_alike_is_paid_by_each():
    """What a layer makes and the next and the last thing read is moved as often as there are layers."""
    with fake_ranks(2), mock.patch.object(deciding, "_solution", wraps=deciding._solution) as solved:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        with torch.no_grad():
            model = distribute_model(decoder(3, 256), mesh, PLAN, **QUIET)
            torch.compile(model, backend="dtensor", options=AOT)(batch(8, 128, 256))
        recording, choices, _ = solved.call_args.args
        alike, each = (
            deciding._solution(recording, choices, deciding.steps_of(recording.tape, alike=a)) for a in (True, False)
        )
    assert alike[2] >= each[3]
