"""Rules of one's own: what the text means, what is refused, and that engine, autograd and compiler take them."""

import contextlib
import doctest
import warnings

import pytest
import torch
import torch.distributed as dist

import dtensor
from dtensor import (
    DTensor,
    OperatorError,
    Partial,
    Replicate,
    Rule,
    Shard,
    StrictError,
    distribute_tensor,
    init_device_mesh,
)
from dtensor.dispatch import dispatch
from dtensor.rules import RULES
from dtensor.testing import Case, CountCollectives, with_ranks, with_threads, wrong_candidates
from dtensor.torch_private.compiling import dynamo_counters

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()


def define(schema, kernel, fake=None, **options):
    """A custom operator of this test module."""
    name = f"dtensor_test::{schema.partition('(')[0]}"
    torch.library.define(name, schema[schema.index("(") :], **options)
    torch.library.impl(name, "CPU")(kernel)
    torch.library.register_fake(name)(fake or kernel)
    return getattr(torch.ops.dtensor_test, name.split("::")[1])


@torch.library.custom_op("dtensor_test::scale_rows", mutates_args=())
def scale_rows(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * w[:, None]


@scale_rows.register_fake
def _(x, w):
    return torch.empty_like(x)


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad):
    x, w = ctx.saved_tensors
    return grad * w.unsqueeze(1), (grad * x).sum(1)


scale_rows.register_autograd(_backward, setup_context=_save)


def _fill(x):
    x.fill_(7)


linear = define(
    "linear(Tensor x, Tensor w, Tensor? bias=None) -> Tensor",
    lambda x, w, bias=None: x @ w.T + (0 if bias is None else bias),
)
norms = define("norms(Tensor x) -> (Tensor, Tensor)", lambda x: (x * 2, (x * x).sum(1)))
largest = define("largest(Tensor x) -> Tensor", lambda x: x.amax(0))
average = define("average(Tensor x) -> Tensor", lambda x: x.mean(0))
total = define("total(Tensor[] xs, float scale=1.0) -> Tensor", lambda xs, scale=1.0: sum(xs) * scale)
parts = define("parts(Tensor x, int n) -> Tensor[]", lambda x, n: [t.clone() for t in x.chunk(n, 1)])
center = define("center(Tensor x) -> Tensor", lambda x: x - x.mean(-1, keepdim=True))
shifted = define(
    "shifted(Tensor x, *, bool rows=False) -> Tensor", lambda x, *, rows=False: x.roll(1, 0 if rows else 1)
)
grouped = define(
    "grouped(Tensor x, int width) -> Tensor", lambda x, width: x.unflatten(1, (-1, width)).cumsum(2).flatten(1)
)
write = define("write(Tensor(a!) x) -> ()", _fill, lambda x: None)
composite = define("composite(Tensor x) -> Tensor", lambda x: x + 1)


@pytest.fixture(autouse=True)
def rules_as_before():
    before = dict(RULES)
    yield
    RULES.clear()
    RULES.update(before)
    dispatch.forget()


@pytest.fixture
def mesh(fake_mesh):
    return fake_mesh(2)


def f(*shape):
    return torch.rand(shape, dtype=torch.float64) + 0.5


def registered(op, *args, **kwargs):
    dtensor.register_sharding(op, *args, **kwargs)
    return op


LINEAR = [("x", "bias"), ("w", "bias")]
CASES = {
    "outer product of factors": lambda: [
        Case(registered(scale_rows, "mk,m->mk", linear=("x", "w")), (f(5, 4), f(5)), at_least=7),
    ],
    "contraction, with a bias or without": lambda: [
        Case(registered(linear, "mk,nk,n->mn", reduce="k", linear=LINEAR, added="bias"), a, at_least=8)
        for a in ((f(5, 4), f(6, 4)), (f(5, 4), f(6, 4), f(6)))
    ],
    "two outputs": lambda: [Case(registered(norms, "mk->mk,m", reduce={"k": "sum"}), (f(5, 4),), at_least=3)],
    "maximum": lambda: [Case(registered(largest, "mk->k", reduce={"m": "max"}), (f(n, 4),), 3) for n in (6, 5, 1)],
    "average": lambda: [
        Case(registered(average, "mk->k", reduce={"m": "avg"}, linear="x"), (f(n, 4),)) for n in (6, 5)
    ],
    "a list of operands": lambda: [Case(registered(total, "mk->mk", linear=["xs"]), ([f(5, 4)] * 2, 2.0), at_least=5)],
    "a list of outputs": lambda: [Case(registered(parts, "m1->m1", linear="x"), (f(5, 4), 2), at_least=4)],
    "groups of channels": lambda: [
        Case(registered(grouped, "n(gk)->n(gk)", sizes={"k": "width"}, linear="x"), (f(5, 12), n), at_least=5)
        for n in (2, 3)
    ],
    "any dimensions that are never sharded": lambda: [
        Case(registered(scale_rows, "m*,m->m*", linear=(0, 1)), (f(5, 4), f(5)), at_least=6)
    ],
    "leading dimensions": lambda: [
        Case(registered(center, "...1->...1", linear="x"), (f(*shape),), at_least=n)
        for shape, n in (((5, 4), 4), ((3, 5, 4), 5), ((4,), 3))
    ],
    "broadcast operands": lambda: [
        Case(registered(total, "...->..."), ([f(5, 4), f(4), f(5, 1)],), at_least=3),
        Case(total, ([f(1, 4), f(5, 1)],), at_least=3),
    ],
}


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_every_candidate_is_right(name, n):
    torch.manual_seed(0)
    assert wrong_candidates(CASES[name](), n) == []


@pytest.mark.parametrize(
    ("op", "args", "rule", "wrong"),
    [
        (linear, (f(4, 4), f(4, 4), f(4)), Rule("mk,nk,n->mn", reduce="k"), "S(1) S(1) R -> P"),
        (center, (f(4, 4),), Rule("mk->mk"), "S(1) -> S(1)"),
        (norms, (f(4, 4),), Rule("mk->mk,m", reduce="k", linear="x"), "P -> P P"),
        (largest, (f(4, 4),), Rule("mk->k", reduce="m"), "S(0) -> P"),
    ],
)
def test_a_rule_that_does_not_tell_the_truth_is_found_out(op, args, rule, wrong):
    torch.manual_seed(0)
    dtensor.register_sharding(op, rule)
    found = wrong_candidates([Case(op, args)], 2)
    assert any(wrong in line for line in found), found


@with_threads(2)
def test_it_runs_on_shards(rank):
    mesh = init_device_mesh("cpu", (2,))
    x, w = torch.arange(12.0).reshape(4, 3), torch.tensor([1.0, 2.0, 3.0, 4.0])
    if rank == 0:
        dtensor.register_sharding(scale_rows, "mk,m->mk", linear=("x", "w"))
    dist.barrier()
    dx, dw = (distribute_tensor(t, mesh, [S0]).requires_grad_() for t in (x, w))
    with CountCollectives() as seen, dtensor.strict():
        out = scale_rows(dx, dw)
        out.sum().backward()
    assert not seen.collectives
    assert out.placements == dx.grad.placements == dw.grad.placements == (S0,)
    assert torch.equal(out.full_tensor(), x * w[:, None])
    assert torch.equal(dw.grad.full_tensor(), x.sum(1))
    assert torch.equal(dx.grad.full_tensor(), w[:, None].expand(4, 3))


@with_ranks(2)
def test_it_compiles(rank):
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    dtensor.register_sharding(torch.ops.dtensor_test.scale_rows, "mk,m->mk", linear=("x", "w"))
    x, w = torch.rand(5, 3), torch.rand(5)
    dx, dw = (distribute_tensor(t, mesh, [S0]).requires_grad_() for t in (x, w))
    compiled = torch.compile(lambda x, w: scale_rows(x, w).relu(), backend="aot_eager", fullgraph=True)
    with dtensor.strict():
        out = compiled(dx, dw)
        out.sum().backward()
    assert out.placements == (S0,)
    assert torch.allclose(out.full_tensor(), x * w[:, None])
    assert torch.allclose(dw.grad.full_tensor(), x.sum(1))


def test_the_second_registration_replaces_the_first_and_what_was_decided(mesh):
    x = distribute_tensor(f(4, 4), mesh, [S1])
    dtensor.register_sharding(norms, "m1->m1,m")
    assert norms(x)[1].placements == (S0,)
    dtensor.register_sharding(norms, "mk->mk,m", reduce="k")
    assert [t.placements for t in norms(x)] == [(S1,), (P,)]


def test_compiled_code_is_not_kept_for_another_rule_nor_for_strict_mode(mesh, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    x = distribute_tensor(torch.rand(4, 4), mesh, [S0])
    found, hits = [], []
    for text, context in (
        ("mk->mk", contextlib.nullcontext()),
        ("1k->1k", contextlib.nullcontext()),
        ("mk->mk", contextlib.nullcontext()),
        ("mk->mk", dtensor.strict()),
    ):
        dtensor.register_sharding(center, text)
        torch.compiler.reset()
        dynamo_counters().clear()
        with context:
            found.append(torch.compile(lambda x: center(x).relu(), fullgraph=True)(x).placements)
        hits.append(dynamo_counters()["aot_autograd"]["autograd_cache_hit"])
    assert found == [(S0,), (S1,), (S0,), (S0,)]
    assert hits == [0, 0, 1, 0]


def test_an_operator_without_a_rule_gets_one(mesh):
    x = distribute_tensor(torch.rand(4), mesh, [S0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.histc(x, 3).placements == (R,)
    before = dtensor.fallbacks()
    dtensor.register_sharding(torch.ops.aten.histc.default, "m->1", reduce="m")  # of a fixed range
    with dtensor.strict():
        found = torch.histc(x, 3, 0, 1)
    assert not dtensor.fallbacks() - before
    assert found.placements == (P,)


def test_one_overload_leaves_the_others_alone(mesh):
    x = distribute_tensor(torch.rand(4, 4), mesh, [S0])
    dtensor.register_sharding(torch.ops.aten.add.Tensor, "11,11->11")
    assert (x + x).placements == (R,)
    assert torch.ops.aten.add.Scalar(x, 1).placements == (S0,)


def test_a_rule_comes_before_the_composite_of_the_library(mesh):
    x = distribute_tensor(torch.rand(4, 4), mesh, [S0])
    dtensor.register_sharding(torch.ops.aten.linalg_vector_norm, "11->")
    assert torch.linalg.vector_norm(x).placements == (R,)
    with dtensor.strict(), pytest.raises(StrictError, match=r"aten.linalg_vector_norm.default would redistribute"):
        torch.linalg.vector_norm(x)


def test_a_function_sees_the_arguments(mesh):
    seen = []

    @dtensor.register_sharding(shifted)
    def rule(x, *, rows):
        seen.append((x.shape, x.dtype, x.ndim, rows))
        return Rule("mk->mk", blocked="m" if rows else "k")

    x = distribute_tensor(f(4, 4), mesh, [S0])
    assert shifted(x).placements == (S0,)
    assert shifted(x, rows=True).placements == (S1,)
    assert seen == [((4, 4), torch.float64, 2, False), ((4, 4), torch.float64, 2, True)]
    assert callable(rule)

    @dtensor.register_sharding(total)
    def _(xs):  # the rest of the arguments need not be taken
        return "mk->mk" if len(xs) == 2 else "1k->1k"

    assert total([x, x]).placements == (S0,)
    assert total([x, x, x], 2.0).placements == (S1,)


def test_floats_of_a_call_are_seen(mesh):
    """By the rule of a user, and by the operator's own function of shapes: nothing is kept for another float."""
    widened = define(
        "widened(Tensor x, float by) -> Tensor",
        lambda x, by: x.repeat(1, int(by)),
        lambda x, by: x.new_empty(x.shape[0], int(by) * x.shape[1]),
    )
    x = distribute_tensor(f(4, 4), mesh, [S0])
    for rule in (None, "m1->m1"):
        if rule is not None:
            dtensor.register_sharding(widened, rule)
        with dtensor.implicit_replication(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert [widened(x, by).shape[1] for by in (2.0, 3.0, 2.0)] == [8, 12, 8]

    @dtensor.register_sharding(total)
    def _(xs, scale):
        return "mk->mk" if scale == 2 else "1k->1k"

    assert [total([x], scale).placements for scale in (2.0, 3.0, 2.0)] == [(S0,), (S1,), (S0,)]

    @dtensor.register_sharding(torch.ops.aten.leaky_relu.default)
    def _(x, slope):
        return "mk->mk" if slope == 2 else "1k->1k"

    found = [torch.ops.aten.leaky_relu.default(x, slope).placements for slope in (2.0, 3.0, 2.0)]
    assert found == [(S0,), (S1,), (S0,)]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("mk,m", {}, r"a rule reads 'operands->outputs', such as 'mk,kn->mn'; got 'mk,m'"),
        ("mk,m->n", {}, r"factor 'n' of an output is in no operand.* write 1 for that dimension"),
        (
            "m2,m->m1",
            {},
            r"a dimension is a letter, 1, \(ab\) for several factors, or ... or \* for several .*; got '2' in 'm2'",
        ),
        ("...k...,m->k", {}, r"... or \* may occur only once in a term"),
        ("mk,m->mk", {"reduce": "z"}, r"has no factor 'z', .*; its factors are k, m"),
        ("mk,m->mk", {"blocked": "z"}, r"has no factor 'z'"),
        ("mk,m->mk", {"reduce": "k"}, r"factor 'k' is in every output, so it is not reduced"),
        ("mk,m->m1", {}, r"output 0 lacks factor 'k', so it could never be sharded; write reduce='k' if .* else 1"),
        ("mk,m->mk", {"linear": 2}, r"has no argument 2; its terms are 0 to 1"),
        ("m(gk),m->m(gk)", {}, r"nothing tells the sizes of both 'g' and 'k'; write sizes="),
        ("m1,m->m1", {"sizes": {"g": 2}}, r"has no factor 'g', which sizes=.* names"),
        ("mk,m->m1", {"reduce": {"k": "mean"}}, r"reduces by one of sum, avg, max, min, product; got 'mean'"),
        (
            "mk->mk",
            {},
            r"'mk->mk' has 1 operands, dtensor_test.scale_rows.default takes 2 tensors \(x, w\): dtensor_test",
        ),
        ("m1,m->m1,m", {}, r"'m1,m->m1,m' has 2 outputs, dtensor_test.scale_rows.default returns 1 tensors"),
        ("mk,m->mk", {"linear": "y"}, r"has no tensor argument 'y'; it takes x, w"),
        ("mk,m->mk", {"linear": [("x", "x")]}, r"jointly linear, each once; got \('x', 'x'\)"),
        ("mk,m->mk", {"linear": [()]}, r"jointly linear, each once; got \(\)"),
        ("mk,m->mk", {"linear": [("x", "w"), ("w", "x")]}, r"linear names the same arguments twice"),
        ("mk,m->mk", {"added": "w"}, r"w cannot be added to a reduced result, as nothing is reduced; write reduce="),
        ("mk,m->m1", {"added": "x", "reduce": "k"}, r"x is added to the result of reducing factor 'k', so it cannot"),
    ],
)
def test_what_cannot_be_a_rule(text, options, message):
    with pytest.raises(ValueError, match=message):
        dtensor.register_sharding(scale_rows, text, **options)
    assert str(scale_rows._opoverload) not in RULES


@pytest.mark.parametrize("sign", ["/", "0", "2", "_", "~", ".", "(", "()", "(1a)", ")"])
def test_letters_ones_and_dots_are_dimensions(sign):
    with pytest.raises(ValueError, match="a dimension is a letter, 1, "):
        Rule(f"m{sign}->m")


def test_a_letter_stands_once_in_a_term_and_the_first_that_is_wrong_is_named():
    with pytest.raises(ValueError, match="factor 'm' stands twice in a term, so it could never be sharded; write 1"):
        Rule("mm->m")
    with pytest.raises(ValueError, match="factor 'x' of an output is in no operand"):
        Rule("m->xy")
    with pytest.raises(ValueError, match=r"has no factor 'x', .*; its factors are k, m"):
        Rule("mk->m", reduce={"x": "sum", "y": "sum"})
    for option in ("k", "x"):
        with pytest.raises(TypeError, match="positional argument"):
            Rule("mk->m", option)


def test_a_rule_prints_as_it_was_written():
    rule = Rule("mk,n->m", reduce="k", linear="x", blocked="n")
    assert repr(rule) == "Rule(text='mk,n->m', reduce='k', linear='x', blocked='n')"
    assert rule == Rule("mk,n->m", reduce="k", linear="x", blocked="n") != Rule("mk,n->m", reduce="k", blocked="n")
    assert len({rule, rule}) == 1


@pytest.mark.parametrize("option", ["reduce", "linear", "added", "blocked", "sizes"])
def test_options_of_another_type(option):
    with pytest.raises(TypeError, match=rf"{option} takes .*; got 3.5"):
        Rule("mk->m", **{option: 3.5})
    with pytest.raises(TypeError, match=r"a rule is a string such as .*; got 3"):
        Rule(3)


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (write.default, r"no sharding rule for dtensor_test.write.default: it writes to its arguments"),
        (torch.ops.aten.linear.default, r"is written in terms of other operators, which DTensor sees in its place"),
        (torch.ops.aten.nonzero.default, r"returns a result that depends on values"),
        (torch.ops.dtensor.all_gather.default, r"is laid out by the library itself"),
        (write, r"no overload of .* can have a sharding rule"),
    ],
)
def test_operators_that_cannot_have_a_rule(op, message):
    with pytest.raises(ValueError, match=message):
        dtensor.register_sharding(op, "m->m")


def test_what_is_no_operator():
    with pytest.raises(TypeError, match=r"takes an operator: .* got the function"):
        dtensor.register_sharding(torch.relu, "m->m")
    with pytest.raises(TypeError, match=r"takes the text of a rule and its options, or a dtensor.Rule; got 3"):
        dtensor.register_sharding(scale_rows, 3)
    with pytest.raises(TypeError, match=r"takes reduce only together with the text"):
        dtensor.register_sharding(scale_rows, reduce="k")
    with pytest.raises(
        ValueError, match=r"takes 3 arguments \(x, w, v\), the operator only 2: dtensor_test::scale_rows"
    ):
        dtensor.register_sharding(scale_rows)(lambda x, w, v: "mk,m->mk")


def test_what_does_not_fit_the_call(mesh):
    x, w = distribute_tensor(f(4, 4), mesh, [S0]), distribute_tensor(f(4), mesh, [S0])
    dtensor.register_sharding(scale_rows, "bmk,m->bmk")
    with pytest.raises(OperatorError, match=r"gives x 3 dimensions, but its shape is \[4, 4\]; correct the rule"):
        scale_rows(x, w)
    dtensor.register_sharding(norms, "mk->mk,k", blocked="m")
    with pytest.raises(OperatorError, match=r"dimension 0 of output 1 is factor 'k', of length 3, but its length is 4"):
        norms(distribute_tensor(f(4, 3), mesh, [S0]))
    dtensor.register_sharding(linear, "mk,kn,n->mn", reduce="k")
    with pytest.raises(OperatorError, match=r"dimension 0 of w is factor 'k', of length 4, but its length is 6"):
        linear(x, distribute_tensor(f(6, 4), mesh, [S0]))
    dtensor.register_sharding(scale_rows)(lambda x, w: None)
    with pytest.raises(TypeError, match=r"returns a dtensor.Rule or its text; got None"):
        scale_rows(x, w)


def test_what_is_written_to_without_a_rule(mesh):
    x = distribute_tensor(torch.zeros(4), mesh, [S0])
    with dtensor.strict(), pytest.raises(StrictError, match=r"write x.redistribute\(placements=\[Replicate\(\)\]\)"):
        write(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        write(x)
    assert x.to_local().tolist() == [7.0] * 2


def test_a_case_names_one_operator():
    with pytest.raises(ValueError, match=r"a Case calls one operator, but .*; name the overload"):
        Case(torch.ops.aten.add, (f(2), f(2)))
    with pytest.raises(AssertionError, match=r"composite.default has no rule; give it one with dtensor.register_shard"):
        wrong_candidates([Case(composite, (f(2),))], 2)


def test_averages_are_cut_evenly_or_not_at_all(mesh):
    dtensor.register_sharding(average, "m1->1", reduce={"m": "avg"})
    even, uneven = (distribute_tensor(f(n, 1), mesh, [S0]) for n in (4, 3))
    assert average(even).placements == (Partial("avg"),)
    assert average(uneven).placements == (R,)


def test_partial_operands(mesh):
    dtensor.register_sharding(scale_rows, "mk,m->mk", linear=("x", "w"))
    x = DTensor.from_local(f(4, 4), mesh, [P])
    assert scale_rows(x, distribute_tensor(f(4), mesh, [R])).placements == (P,)


def test_the_docstring_runs():
    found = doctest.DocTestFinder().find(dtensor.register_sharding, globs={"torch": torch, "dtensor": dtensor})
    assert sum(doctest.DocTestRunner().run(t).failed for t in found) == 0
    assert sum(len(t.examples) for t in found) == 7
