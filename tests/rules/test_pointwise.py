"""Pointwise operators: torch's tag, the tables beside it, and what each is linear in."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from dtensor.rules import rule_of
from dtensor.rules.families.pointwise import FALLING, LINEAR, POINTWISE, RISING, broadcast_shape, pointwise
from dtensor.rules.notation import LibraryRule
from dtensor.rules.plan import signature
from dtensor.testing import CountCollectives, with_threads
from dtensor.testing.rules.candidates import booleans as mask
from dtensor.testing.rules.candidates import case as c
from dtensor.testing.rules.candidates import floats as f
from dtensor.testing.rules.candidates import integers as ints
from dtensor.testing.rules.candidates import wrong_candidates
from tests.rules.checking import check

aten = torch.ops.aten


def backward_cases():
    g, x = f(5, 6), f(5, 6) - 1
    yield c(aten.elu_backward.default, g, 1.0, 1.0, 1.0, False, x, at_least=5)
    yield c(aten.leaky_relu_backward.default, g, x, 0.1, False, at_least=5)
    yield c(aten.hardtanh_backward.default, g, x, -0.2, 0.2, at_least=5)
    yield c(aten.softplus_backward.default, g, x, 1.0, 20.0, at_least=5)
    yield c(aten.logit_backward.default, g, f(5, 6) / 2, at_least=5)
    yield c(aten.log_sigmoid_backward.default, g, x, f(5, 6), at_least=5)
    yield c(aten._prelu_kernel_backward.default, g, x, f(1, 6), at_least=5)
    yield c(aten.rrelu_with_noise_backward.default, g, x, f(5, 6), 0.1, 0.3, True, False, at_least=5)
    for op in (aten.hardswish_backward, aten.hardsigmoid_backward, aten.mish_backward, aten.sigmoid_backward):
        yield c(op.default, g, x, at_least=5)
    for op in (aten.hardshrink_backward, aten.softshrink_backward):
        yield c(op.default, g, x, 0.2, at_least=5)


def plain_cases():
    x, y, row = f(5, 6), f(5, 6), f(6)
    yield c(aten.log_sigmoid_forward.default, x, at_least=3)
    yield c(aten._prelu_kernel.default, x - 1, f(1, 6), at_least=3)
    yield c(aten.polygamma.default, 1, x, at_least=3)
    yield c(aten.frexp.Tensor, x, at_least=3)
    yield c(aten.copysign.Tensor, x, row - 1, at_least=3)
    yield c(aten.heaviside.default, x - 1, row, at_least=3)
    yield c(aten.nan_to_num.default, x, at_least=3)
    yield c(aten.clamp.Tensor, x, row, y, at_least=3)
    yield c(aten.special_zeta.default, x + 1, y, at_least=3)
    yield c(aten.special_bessel_j0.default, x, at_least=3)
    yield c(aten.special_chebyshev_polynomial_t.default, x, row, at_least=3)
    yield c(aten.bitwise_xor.Tensor, ints(9, 5, 6), ints(9, 6), at_least=3)
    yield c(aten.__lshift__.Scalar, ints(9, 5, 6), 2, at_least=3)
    yield c(aten.logical_or.default, mask(5, 6), mask(6), at_least=3)
    yield c(aten.rsub.Tensor, x, row, at_least=5)
    yield c(aten.lerp.Tensor, x, y, row, at_least=5)
    yield c(aten.masked_fill_.Tensor, x, mask(6), f(), at_least=3)
    yield c(aten.fake_quantize_per_tensor_affine_cachemask.default, x.float(), 0.1, 0, 0, 255, at_least=3)
    channels = (torch.rand(6) + 0.1, torch.zeros(6))
    yield c(aten.fake_quantize_per_channel_affine_cachemask.default, x.float(), *channels, 1, 0, 255, at_least=3)
    yield c(aten.rrelu_with_noise.default, x, f(5, 6), at_least=3)
    of_tensors = aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default
    yield c(of_tensors, x.float(), torch.tensor([0.1]), ints(1, 1).int(), ints(1, 1) + 1, 0, 255, at_least=3)
    yield c(aten._add_relu.Tensor, x - 1, row - 1, alpha=2, at_least=3)
    yield c(aten._dirichlet_grad.default, x / 3, y, y + 2, at_least=3)
    yield c(aten._standard_gamma_grad.default, x, y, at_least=3)
    yield c(aten.floor_divide.default, x, row, at_least=3)
    yield c(aten.special_ndtr.default, x, at_least=3)
    yield c(aten._lazy_clone.default, x, at_least=3)
    for rounding_mode in (None, "trunc"):
        yield c(aten.div.Tensor_mode, x, row, rounding_mode=rounding_mode, at_least=3)
        yield c(aten.div.Scalar_mode, x, 0.3, rounding_mode=rounding_mode, at_least=3)
    yield c(aten.masked_fill.Scalar, x, mask(5, 6), False, at_least=5)


def complex_cases():
    z, x = torch.complex(f(5, 6), f(5, 6)), f(5, 6)
    yield c(aten.complex.default, x, f(6), at_least=5)
    yield c(aten.polar.default, x, f(5, 6), at_least=5)
    yield c(aten._conj.default, z, at_least=5)
    yield c(aten._conj_physical.default, z, at_least=5)
    yield c(aten.view_as_real.default, z, at_least=5)
    yield c(aten.view_as_complex.default, f(5, 6, 2), at_least=5)
    yield c(aten.conj.default, z, at_least=5)
    yield c(aten.real.default, z, at_least=3)
    yield c(aten._neg_view.default, x, at_least=5)
    yield c(aten.angle.default, z, at_least=3)
    yield c(aten.abs.default, z, at_least=3)
    yield c(aten.mul.Tensor, z, x, at_least=7)


def ordered_cases():
    x, y, row = f(5, 6) - 1, f(5, 6), f(6) - 1
    bounds = {"clamp": (-0.2, 0.3), "clamp_max": (0.3,), "clamp_min": (-0.2,)}
    for name in sorted(RISING | FALLING):
        linear = 2 if name in LINEAR else 0
        yield c(getattr(aten, name).default, x * 3, *bounds.get(name, ()), at_least=5 + linear)
    yield c(aten._to_copy.default, x, dtype=torch.float32, at_least=5)
    yield c(aten._to_copy.default, x, at_least=7)
    yield c(aten._to_copy.default, x.float(), at_least=7)
    yield c(aten._to_copy.default, ints(9, 5, 6), dtype=torch.float64, at_least=3)
    yield c(aten._to_copy.default, x * 9, dtype=torch.int64, at_least=3)
    yield c(aten.clamp.Tensor, x, row, y, at_least=5)
    yield c(aten.maximum.default, x, row, at_least=8)
    yield c(aten.minimum.default, x, row, at_least=8)
    yield c(aten.add.Tensor, x, row, at_least=5)
    yield from [c(aten.add.Tensor, x, y, alpha=alpha, at_least=5) for alpha in (-2, 2, 1.0)]
    yield c(aten.sub.Tensor, x, y, at_least=5)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("group", [backward_cases, plain_cases, complex_cases, ordered_cases])
def test_every_candidate_is_right(group, n):
    check(group, n)


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ([(4, 1), (5,)], (4, 5)),
        ([(2,), (2,), ()], (2,)),
        ([(1, 2), (3, 1)], (3, 2)),
        ([(1,), (0,)], (0,)),
        ([(0, 1), (1, 3)], (0, 3)),
        ([()], ()),
    ],
)
def test_shapes_that_broadcast(shapes, expected):
    assert broadcast_shape(shapes) == expected == tuple(torch.broadcast_shapes(*shapes))


@with_threads(2)
def test_memory_of_a_shard_is_in_the_order_of_the_whole(rank):
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.ones(4, 6, 2), mesh, [Shard(1)])
    for stride in ((12, 2, 1), (1, 8, 4), (6, 1, 24)):
        made = x.new_empty_strided((4, 6, 2), stride)
        assert (made.placements, made.stride()) == ((Shard(1),), stride)
        order = sorted(range(3), key=stride.__getitem__)
        local = made.to_local().stride()
        assert sorted(range(3), key=local.__getitem__) == order
        assert made.to_local().shape == (4, 3, 2)
        assert sorted(local)[0] == 1


def overloads(name):
    packet = getattr(aten, name, None)
    return [] if packet is None else [getattr(packet, o) for o in packet.overloads()]


def tagged():
    """The aten operators that torch tags as pointwise, by name."""
    found = {n for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::")}
    names = {n.removeprefix("aten::").partition(".")[0] for n in found}
    return sorted(n for n in names if any(torch.Tag.pointwise in o.tags for o in overloads(n)))


def test_every_tagged_operator_has_a_rule_and_none_is_listed_besides():
    names = tagged()
    assert len(names) > 150
    without = {n for n in names for o in overloads(n) if torch.Tag.pointwise in o.tags and rule_of(o) is None}
    # A number and not a tensor; random.
    assert without == {"equal", "rrelu"}
    assert not set(POINTWISE) & set(names)


def test_tables_name_operators_that_exist():
    assert [n for n in POINTWISE if not overloads(n)] == []
    for key, linear in LINEAR.items():
        name, _, overload = key.partition(".")
        found = [o for o in overloads(name) if not overload or o._overloadname == overload]
        assert found, key
        counts = [len(signature(func).arguments) for func in found if signature(func).arguments]
        for count in {max(counts)} if overload == "" else set(counts):
            LibraryRule(",".join(["..."] * count) + "->...", linear=linear)  # names no argument that is not there


def test_lookup():
    assert rule_of(aten.special_entr.default) is pointwise
    assert rule_of(aten.add_.Tensor) is rule_of(aten.add.Tensor) is rule_of(aten._foreach_add_.List) is pointwise
    assert rule_of(aten.permute_copy.default) is rule_of(aten.permute.default)
    assert rule_of(aten.index_copy_.default) is rule_of(aten.index_add.default)
    assert rule_of(aten.nonzero.default) is None


@with_threads(2)
def test_shift_is_not_taken_for_an_in_place_operator(rank):
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.arange(4), mesh, [Shard(0)])
    assert torch.equal((x << 2).full_tensor(), torch.arange(4) << 2)
    assert torch.equal(x.full_tensor(), torch.arange(4))


@with_threads(2)
def test_foreach_takes_the_rule_of_each_element(rank):
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.arange(6.0).reshape(2, 3), mesh, [Shard(1)])
    (largest,) = torch._foreach_max([x])
    assert largest.placements == (Partial("max"),)
    assert largest.full_tensor() == 5
    row = torch.arange(3.0).reshape(1, 3)
    (largest,) = torch._foreach_max([distribute_tensor(row, mesh, [Shard(0)])])  # of nothing, on the second rank
    assert largest.full_tensor() == 2
    (found,) = torch._foreach_erf([x])
    assert found.placements == (Shard(1),)
    assert torch.equal(found.full_tensor(), torch.erf(torch.arange(6.0).reshape(2, 3)))
    sums = [DTensor.from_local(torch.ones(4) * (rank + 1), mesh, [Partial()]) for _ in range(2)]
    with CountCollectives() as counted:
        (added,) = torch._foreach_add(sums[:1], sums[1:], alpha=2)
        torch._foreach_sub_([added], sums[:1])
        (scaled,) = torch._foreach_mul([added], [3.0])
    assert counted.get_total_counts() == 0
    assert torch.equal(scaled.full_tensor(), torch.full((4,), 18.0))


@with_threads(2)
def test_views_in_place_change_the_tensor_itself(rank):
    mesh = init_device_mesh("cpu", (2,))
    dense = torch.arange(24.0).reshape(4, 1, 6)
    x, y = distribute_tensor(dense, mesh, [Shard(0)]), dense.clone()
    assert x.squeeze_(1).transpose_(0, 1) is x
    y.squeeze_(1).transpose_(0, 1)
    assert (x.shape, x.stride(), x.placements) == (y.shape, y.stride(), (Shard(1),))
    assert torch.equal((x + 1).full_tensor(), y + 1)


@with_threads(2)
def test_rrelu_draws_the_numbers_of_one_device(rank):
    mesh = init_device_mesh("cpu", (2,))
    x = torch.arange(12.0).reshape(4, 3) - 6
    placed = distribute_tensor(x, mesh, [Shard(0)])
    noise = distribute_tensor(torch.zeros(4, 3), mesh, [Shard(0)])
    generator = torch.Generator().manual_seed(3)
    found = aten.rrelu_with_noise.default(placed, noise, 0.1, 0.3, True, generator)
    kept = torch.zeros(4, 3)
    expected = aten.rrelu_with_noise.default(x, kept, 0.1, 0.3, True, torch.Generator().manual_seed(3))
    assert found.placements == (Shard(0),)
    assert torch.equal(found.full_tensor(), expected)
    assert torch.equal(noise.full_tensor(), kept)
    made = aten.rrelu_with_noise_functional.default(placed, noise, 0.1, 0.3, True, generator.manual_seed(3))
    assert [t.placements for t in made] == [(Shard(0),)] * 2
    assert all(torch.equal(t.full_tensor(), wanted) for t, wanted in zip(made, (expected, kept)))
    assert aten.rrelu_with_noise.default(placed, noise).redistribute(mesh, [Replicate()]).shape == (4, 3)


@pytest.mark.parametrize("n", [2, 4])
def test_copies_pass_parts_of_any_reduction(n):
    operators = (aten.alias, aten.clone, aten.detach, aten.lift_fresh, aten.positive)
    assert wrong_candidates([c(op.default, f(5, 6), at_least=8) for op in operators], n) == []


def test_zero_keeps_parts_where_they_are():
    assert wrong_candidates([c(aten.zero_.default, f(5, 6), at_least=5)], 2) == []


@with_threads(2)
def test_norm_writes_to_what_out_gives(rank):
    mesh = init_device_mesh("cpu", (2,))
    dense = torch.arange(24.0).reshape(4, 6).sin()
    out = distribute_tensor(torch.zeros(6), mesh, [Replicate()])
    for order in (2, 3, float("inf")):
        torch.linalg.vector_norm(distribute_tensor(dense, mesh, [Shard(0)]), order, 0, out=out)
        torch.testing.assert_close(out.full_tensor(), torch.linalg.vector_norm(dense, order, 0))


@with_threads(2)
def test_what_autograd_saves_of_a_maximum_is_not_communicated(rank):
    mesh = init_device_mesh("cpu", (2,))
    dense = torch.arange(24.0).reshape(4, 6).sin()
    x = distribute_tensor(dense, mesh, [Shard(1)]).requires_grad_()
    with CountCollectives() as seen:
        top = x.amax()
    assert seen.collectives == []
    assert top.placements == (Partial("max"),)
    torch.testing.assert_close(top.full_tensor().detach(), dense.amax())
    torch.testing.assert_close((-top).full_tensor().detach(), -dense.amax())
    top.backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad.full_tensor(), (dense == dense.amax()).float())


@with_threads(2)
def test_a_rising_function_of_a_maximum_is_not_communicated(rank):
    mesh = init_device_mesh("cpu", (2,))
    dense = torch.arange(24.0).reshape(4, 6).sin()
    top = distribute_tensor(dense, mesh, [Shard(1)]).amax(1)
    with CountCollectives() as seen:
        out = -torch.relu(top).clamp(max=0.5).exp_()
    assert seen.collectives == []
    assert out.placements == (Partial("min"),)
    torch.testing.assert_close(out.full_tensor(), -dense.amax(1).relu().clamp(max=0.5).exp())


@with_threads(2)
def test_a_decision_for_one_factor_does_not_serve_another_sign(rank):
    mesh = init_device_mesh("cpu", (2,))
    dense = torch.arange(24.0).reshape(4, 6).sin()
    top, one = distribute_tensor(dense, mesh, [Shard(1)]).amax(1), distribute_tensor(torch.ones(4), mesh, [Replicate()])
    for alpha in (1.0, -2.0, 1, -2):
        found = torch.add(one, top, alpha=alpha).full_tensor()
        torch.testing.assert_close(found, torch.add(torch.ones(4), dense.amax(1), alpha=alpha))


@with_threads(2)
def test_what_keeps_no_order_is_not_taken_for_it(rank):
    """Integers wrap around, and of a part that loses the result may be NaN, or that of a NaN may not."""
    mesh = init_device_mesh("cpu", (2,))
    dense = torch.tensor([[0, 200], [3, 250]], dtype=torch.uint8)
    top = distribute_tensor(dense, mesh, [Shard(1)]).amax(1)
    assert torch.equal((-top).full_tensor(), -dense.amax(1))
    assert torch.equal((top + 100).full_tensor(), dense.amax(1) + 100)
    signed = torch.tensor([[-1.0, 2.0], [3.0, -4.0]])
    top = distribute_tensor(signed, mesh, [Shard(1)]).amax(1)
    torch.testing.assert_close(top.log().full_tensor(), signed.amax(1).log())
    torch.testing.assert_close((top * -1).full_tensor(), -signed.amax(1))
    inf, nan = float("inf"), float("nan")
    masked = torch.tensor([[5.0, -inf], [5.0, nan]])
    top = distribute_tensor(masked, mesh, [Shard(1)]).amax(1)
    assert (top + inf).full_tensor().tolist()[0] == inf
    assert torch.equal(top.sign().full_tensor(), masked.amax(1).sign())
