"""`explain`: its text for typical calls, and that it neither computes, communicates, warns nor counts."""

import doctest
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import dtensor
from dtensor import (
    DTensor,
    MixedTensorError,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    explain,
    init_device_mesh,
)
from dtensor.dispatch import dispatch
from dtensor.testing import CountCollectives, with_threads

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()


@pytest.fixture
def mesh(fake_mesh):
    return fake_mesh(2)


def make(mesh, shape, placement, grad=False):
    if placement.is_partial():
        return DTensor.from_local(torch.rand(shape), mesh, [placement])
    return distribute_tensor(torch.rand(shape), mesh, [placement]).requires_grad_(grad)


def is_text(found, expected):
    assert str(found) == expected.strip("\n")


def test_matmul_is_the_example_of_the_docstring(mesh):
    names = {"dtensor": dtensor, "torch": torch, "x": make(mesh, (8, 16), S0), "w": make(mesh, (16, 32), S1)}
    (test,) = doctest.DocTestFinder().find(explain, globs=names)
    assert len(test.examples) == 1
    assert doctest.DocTestRunner().run(test).failed == 0


def test_a_view_that_cannot_keep_its_shard(mesh):
    is_text(
        explain(torch.Tensor.view, make(mesh, (2, 3, 8), S1), (6, 8)),
        """
view: 64 bytes, 10.01 us
aten.view.default [rule: runs on local tensors by its rule]
  self torch.float32[2, 3, 8] S(1) -> torch.float32[6, 8] S(1)
  on mesh axis 0 of 2 ranks:
      10.01 us  R -> R
      10.01 us  S(0) -> S(0)
  *   10.01 us  S(2) -> S(1)
      11.01 us  P -> P
      11.01 us  P(avg) -> P(avg)
  self is redistributed, 64 bytes, 10.01 us:
      S(1) -> S(2): all_to_all over axis 0, 64 B
""",
    )


def test_a_shard_that_does_not_divide_is_refused_in_a_merge(mesh):
    found = explain(torch.Tensor.view, make(mesh, (3, 8), S0), (24,))
    refused = [o for o in found.operators[0].options[0] if o.refused]
    assert [str(o) for o in refused] == ["S(0) -> S(0)"]
    assert refused[0].refused == "uneven: 2 does not divide 3, and the dimension is merged or split"
    assert refused[0].seconds is None


def test_an_in_place_add_on_partial(mesh):
    is_text(
        explain(torch.Tensor.add_, make(mesh, (4, 4), P), make(mesh, (4, 4), S0)),
        """
add_: 32 bytes, 11.00 us
aten.add_.Tensor [rule: runs on local tensors by its rule]
  self torch.float32[4, 4] P, other torch.float32[4, 4] S(0) -> torch.float32[4, 4] P
  on mesh axis 0 of 2 ranks:
      26.01 us  R, R -> R
      21.01 us  S(0), S(0) -> S(0)
      31.01 us  S(1), S(1) -> S(1)
  *   11.00 us  P, P -> P
      43.02 us  P(avg), P(avg) -> P(avg)
  other is redistributed, 32 bytes, 11.00 us:
      S(0) -> R: all_gather over axis 0, 32 B
      R -> P: partial over axis 0, local
""",
    )


def test_an_in_place_operator_that_is_moved_back(mesh):
    is_text(
        explain(torch.Tensor.relu_, make(mesh, (4, 4), P)),
        """
relu_: 64 bytes, 16.01 us
aten.relu_.default [rule: runs on local tensors by its rule]
  self torch.float32[4, 4] P -> torch.float32[4, 4] P
  on mesh axis 0 of 2 ranks:
  *   16.01 us  R -> R
      21.01 us  S(0) -> S(0)
      21.01 us  S(1) -> S(1)
      32.01 us  P(max) -> P(max)
      32.01 us  P(min) -> P(min)
  self is redistributed and moved back, 64 bytes, 16.01 us:
      P -> R: all_reduce over axis 0, 64 B
      R -> P: partial over axis 0, local
""",
    )


def test_an_in_place_result_lies_as_its_operand(mesh):
    x, other = make(mesh, (4,), P), make(mesh, (4,), R)
    (found,) = explain(torch.Tensor.mul_, x, other).operators
    assert {str(o): o.refused for o in found.options[0]}["R, P -> P"] == (
        "in place: the result would have another layout than the operand"
    )


def test_an_operator_without_a_rule(mesh):
    before = dtensor.fallbacks()
    is_text(
        explain(torch.histogram, make(mesh, (8, 16), S0), 3),
        """
histogram: 256 bytes, 10.03 us
aten.histogram.bin_ct [replicated: has no rule: runs on full tensors on every rank]
  self torch.float32[8, 16] S(0) -> torch.float32[3] R, torch.float32[4] R
  on mesh axis 0 of 2 ranks:
  *   10.03 us  R -> R, R
  self is redistributed, 256 bytes, 10.03 us:
      S(0) -> R: all_gather over axis 0, 256 B
""",
    )
    assert not dtensor.fallbacks() - before


def test_linear_is_three_operators_and_more(mesh):
    x, w, b = make(mesh, (2, 8, 16), Shard(2), True), make(mesh, (32, 16), S1, True), make(mesh, (32,), R, True)
    found = explain(F.linear, x, w, b)
    *names, last = [o.name for o in found.operators]
    assert names == ["aten.view.default", "aten.t.default", "aten.addmm.default"]
    assert last in ("aten.view.default", "aten._unsafe_view.default")  # the second since torch 2.15
    assert all((o.kind, o.depth) == ("rule", 0) for o in found.operators)
    is_text(
        found.operators[2],
        """
aten.addmm.default [rule: runs on local tensors by its rule]
  self torch.float32[32] R, mat1 torch.float32[16, 16] S(1), mat2 torch.float32[16, 32] S(0) -> torch.float32[16, 32] P
  on mesh axis 0 of 2 ranks:
      20.15 us  R, R, R -> R
      20.13 us  R, S(0), R -> S(0)
  *    1.00 us  P, S(1), S(0) -> P
      21.10 us  S(0), R, S(1) -> S(1)
      22.17 us  P, P, R -> P
      22.17 us  P(avg), P(avg), R -> P(avg)
      22.18 us  P, R, P -> P
      22.18 us  P(avg), R, P(avg) -> P(avg)
  self is redistributed, 0 bytes, 1.00 us:
      R -> P: partial over axis 0, local
""",
    )
    assert F.linear(x, w, b).placements == found.operators[-1].outputs[0].layout.placements == (P,)


def test_operators_that_run_as_others(mesh):
    found = explain(torch.linalg.vector_norm, make(mesh, (8, 16), S0))
    assert [(o.name, o.kind, o.depth) for o in found.operators] == [
        ("aten.linalg_vector_norm.default", "composite", 0),
        ("aten.mul.Tensor", "rule", 1),
        ("aten.sum.dim_IntList", "rule", 1),
        ("aten.sqrt.default", "rule", 1),
    ]
    assert str(found).splitlines()[-1] == "        P -> R: all_reduce over axis 0, 4 B"
    assert found.bytes == 4
    assert found.seconds == pytest.approx(15e-6, rel=1e-3)
    found = explain(torch.ops.aten.hardsigmoid_backward, make(mesh, (8,), S0), make(mesh, (8,), S0))
    assert [o.kind for o in found.operators] == ["rule"]
    found = explain(torch._foreach_add, [make(mesh, (8,), S0)] * 2, [make(mesh, (8,), P), make(mesh, (8,), S0)])
    assert [(o.kind, len(o.moves)) for o in found.operators] == [("foreach", 0), ("rule", 1), ("rule", 0)]


def test_what_attention_moves_itself(mesh):
    q, k = make(mesh, (4, 2, 8, 16), S0), make(mesh, (4, 2, 8, 16), Shard(2))
    with sdpa_kernel(SDPBackend.MATH):
        found = explain(F.scaled_dot_product_attention, q, k, q)
    assert [(o.name, o.kind) for o in found.operators] == [("scaled_dot_product_attention", "implied")]
    assert [m.target.text for m in found.operators[0].moves] == ["S(0)"]
    found = explain(DTensor.redistribute, q, placements=[R])
    assert [(o.name, o.kind) for o in found.operators] == [("dtensor.redistribute.default", "redistribute")]


def test_values_end_the_explanation(mesh):
    found = explain(lambda x: x.nonzero() + 1, make(mesh, (8,), S0))
    assert [(o.name, o.kind) for o in found.operators] == [("aten.nonzero.default", "dynamic")]
    assert str(found).endswith("ends here: what follows depends on values")


def test_a_plain_tensor_ends_it_too(mesh):
    x = make(mesh, (8,), S0)
    with pytest.raises(MixedTensorError) as caught:
        x + torch.rand(8)
    assert explain(torch.add, x, torch.rand(8)).stopped == str(caught.value)
    assert [o.kind for o in explain(torch.add, x, torch.tensor(2.0)).operators] == ["rule"]
    with pytest.raises(RuntimeError, match=r"must match the size|broadcast"):
        explain(torch.add, x, make(mesh, (7,), R))


@with_threads(2)
def test_nothing_is_sent_computed_or_written(rank):
    """On one rank of two: a collective would wait for the other."""
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.ones(4, 4), mesh, [S0])
    other = distribute_tensor(torch.ones(4, 4), mesh, [S1])
    module = distribute_module(nn.Linear(4, 4), mesh)
    if rank == 0:
        with CountCollectives() as seen, dtensor.strict():
            assert explain(torch.Tensor.add_, x, other).bytes == 16
            assert explain(lambda t: t.add_(other).relu() @ other, x).bytes > 16
            assert explain(lambda: (other.mul_(2) @ x).full_tensor()).bytes > 0
            assert explain(module, x).operators[-1].outputs[0].layout.text == "S(0)"
        assert not seen.collectives
    assert x.to_local().eq(1).all()
    assert other.to_local().eq(1).all()


def test_the_choice_is_what_runs(mesh):
    """The chosen candidate of each axis is the cheapest and gives the placements of the real result."""
    pairs = [(a, b) for a in (R, S0, S1, P) for b in (R, S0, S1, P)]
    for function in (torch.matmul, torch.add, torch.mul):
        for a, b in pairs:
            x, y = make(mesh, (8, 8), a), make(mesh, (8, 8), b)
            (found,) = explain(function, x, y).operators
            (chosen,) = [o for o in found.options[0] if o.chosen]
            assert chosen.seconds == min(o.seconds for o in found.options[0])
            assert chosen.outputs == function(x, y).placements
            assert [m.target.placements[0] for m in found.moves] == [
                want for want, have in zip(chosen.inputs, (a, b)) if want != have
            ]


def test_two_axes(fake_mesh):
    mesh = fake_mesh(2, 2)
    x = distribute_tensor(torch.rand(8, 8), mesh, [S0, S1])
    (found,) = explain(torch.mm, x, distribute_tensor(torch.rand(8, 8), mesh, [R, S0])).operators
    chosen = [str(o) for options in found.options for o in options if o.chosen]
    assert chosen == ["S(0), R -> S(0)", "S(1), S(0) -> P"]
    assert found.outputs[0].layout.text == "S(0)P"


def test_html_is_a_table_with_the_text_escaped(mesh):
    html = explain(lambda x: x.relu(), make(mesh, (4,), S0))._repr_html_()
    assert html.startswith("<table><caption>&lt;lambda&gt;: 0 bytes, 0.00 us</caption><tr><th>operator</th>")
    assert "<td>self torch.float32[4] S(0)</td>" in html
    assert "* 0.00 us S(0) -&gt; S(0)" in html
    assert html.count("<tr>") == 2
    assert re.sub(r"</?(table|caption|tr|th|td|br)>", "", html).count("<") == 0


def test_a_registered_operator_is_explained(mesh):
    dtensor.register_sharding(torch.ops.aten.histc.default, "m->1", reduce="m")
    try:
        found = explain(torch.histc, make(mesh, (8,), S0), 4, 0, 1)
        assert [str(o) for o in found.operators[0].options[0]] == ["R -> R", "S(0) -> P"]
    finally:
        del dtensor.rules.RULES["aten.histc.default"]
        dispatch.forget()
