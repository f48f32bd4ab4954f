"""Cross entropy on sharded classes, against one device: forward, backward, and that no logits are gathered."""

import pytest
import torch
import torch.nn.functional as F

from dtensor import DTensor, MixedTensorError, Replicate, Shard, distribute_tensor, init_device_mesh, strict
from dtensor.parallel import linear_cross_entropy, loss_parallel
from dtensor.testing import CountCollectives, with_ranks, with_threads
from dtensor.torch_private.core import TorchDispatchMode, tree_leaves

N, V, D = 12, 10, 6

OPTIONS = [
    {},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"ignore_index": -1},
    {"weight": True},
    {"weight": True, "label_smoothing": 0.2},
    {"reduction": "sum", "weight": True, "ignore_index": 3, "label_smoothing": 0.1},
    {"reduction": "none", "weight": True, "ignore_index": 3},
]


def values(classes=V, dtype=torch.float32):
    logits = torch.sin(torch.arange(N * classes) * 1.7).reshape(N, classes).to(dtype) * 3
    target = torch.arange(N) * 7 % classes
    target[2] = -100
    return logits, target, torch.linspace(0.5, 1.5, classes, dtype=dtype)


def ignoring(target, options):
    return target.masked_fill(target == -100, options.get("ignore_index", -100))


def dense(logits, target, weight, options):
    target = ignoring(target, options)
    x = logits.clone().requires_grad_()
    loss = F.cross_entropy(x, target, **{**options, **({"weight": weight} if "weight" in options else {})})
    backward(loss)
    return loss.detach(), x.grad


def backward(loss):
    """Each element of the loss has another gradient."""
    weights = torch.arange(1.0, loss.numel() + 1).reshape(loss.shape)
    if isinstance(loss, DTensor):
        weights = distribute_tensor(weights, loss.device_mesh)
    (loss * weights).sum().backward()


def sharded(mesh, placements, target_placements, logits, target, weight, options):
    target = ignoring(target, options)
    x = distribute_tensor(logits, mesh, placements).requires_grad_()
    t = distribute_tensor(target, mesh, target_placements)
    given = {**options, **({"weight": distribute_tensor(weight, mesh, None)} if "weight" in options else {})}
    with CountCollectives() as counted:
        loss = F.cross_entropy(x, t, **given)
        backward(loss)
    assert x.grad.placements == tuple(placements)
    return loss.full_tensor().detach(), x.grad.full_tensor(), counted.collectives


@pytest.mark.parametrize("index", range(len(OPTIONS)))
@pytest.mark.parametrize("classes", [V, 7])
@with_threads(2)
def test_sharded_classes(rank, classes, index):
    mesh = init_device_mesh("cpu", (2,))
    given = (*values(classes), OPTIONS[index])
    loss, grad, collectives = sharded(mesh, [Shard(1)], [Replicate()], *given)
    right, right_grad = dense(*given)
    torch.testing.assert_close(loss, right)
    torch.testing.assert_close(grad, right_grad)
    assert {c.op for c in collectives} == {"all_reduce"}
    assert max(c.bytes for c in collectives) <= N * 4, "at most one number a sample"


@with_threads(4)
def test_samples_and_classes_on_two_axes(rank):
    mesh = init_device_mesh("cpu", (2, 2))
    for placements, target_placements in (
        ([Shard(0), Shard(1)], [Shard(0), Replicate()]),
        ([Shard(1), Shard(0)], [Replicate(), Shard(0)]),
        ([Shard(1), Shard(1)], [Replicate(), Replicate()]),
    ):
        for options in OPTIONS[:6]:
            given = (*values(), options)
            loss, grad, collectives = sharded(mesh, placements, target_placements, *given)
            right, right_grad = dense(*given)
            torch.testing.assert_close(loss, right)
            torch.testing.assert_close(grad, right_grad)
            assert {c.op for c in collectives} == {"all_reduce"}


@with_threads(4)
def test_more_ranks_than_classes_and_infinite_logits(rank):
    mesh = init_device_mesh("cpu", (4,))
    logits, target, weight = values(3)
    logits[:, 2] = -torch.inf
    target = target.clamp(max=1)
    loss, grad, _ = sharded(mesh, [Shard(1)], [Replicate()], logits, target, weight, {"weight": True})
    right, right_grad = dense(logits, target, weight, {"weight": True})
    torch.testing.assert_close(loss, right)
    torch.testing.assert_close(grad, right_grad)


@with_threads(2)
def test_images_probabilities_and_half_precision(rank):
    mesh = init_device_mesh("cpu", (2,))
    x = torch.sin(torch.arange(120.0)).view(2, 5, 3, 4)
    target = torch.arange(24).view(2, 3, 4) % 5
    for placement, of_target in ((Shard(1), Replicate()), (Shard(2), Shard(1))):
        loss, grad, _ = sharded(mesh, [placement], [of_target], x, target, torch.ones(5), {})
        right, right_grad = dense(x, target, torch.ones(5), {})
        torch.testing.assert_close(loss, right)
        torch.testing.assert_close(grad, right_grad)
    logits, _, weight = values()
    soft = logits.flip(0).softmax(1)
    loss, grad, _ = sharded(mesh, [Shard(1)], [Shard(1)], logits, soft, weight, {"label_smoothing": 0.1})
    right, right_grad = dense(logits, soft, weight, {"label_smoothing": 0.1})
    torch.testing.assert_close(loss, right)
    torch.testing.assert_close(grad, right_grad)
    half = values(dtype=torch.bfloat16)
    loss, grad, _ = sharded(mesh, [Shard(1)], [Replicate()], *half, {})
    right, right_grad = dense(*half, {})
    torch.testing.assert_close(loss, right, rtol=0.02, atol=1e-2)
    torch.testing.assert_close(grad, right_grad, rtol=0.05, atol=1e-3)


@with_threads(2)
def test_strict_mode_has_no_objection_to_the_region(rank):
    mesh = init_device_mesh("cpu", (2,))
    logits, target, _ = values()
    x = distribute_tensor(logits, mesh, [Shard(1)]).requires_grad_()
    t = distribute_tensor(target, mesh, [Replicate()])
    with loss_parallel(), strict():
        loss = torch.nn.CrossEntropyLoss()(x, t)
        loss.backward()
    torch.testing.assert_close(
        x.grad.full_tensor(), torch.autograd.functional.jacobian(lambda a: F.cross_entropy(a, target), logits)
    )
    with pytest.raises(MixedTensorError, match="argument 'target' is a plain tensor"):
        F.cross_entropy(x, target)


def linear_values(classes, shape=(N,)):
    x = torch.sin(torch.arange(N * D) * 0.7).reshape(*shape, D)
    w = torch.cos(torch.arange(classes * D) * 1.3).reshape(classes, D)
    b = torch.linspace(-1, 1, classes)
    return x, w, b, values(classes)[1].reshape(shape), torch.linspace(0.5, 1.5, classes)


def linear_dense(x, w, b, target, cw, options):
    target = ignoring(target, options)
    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    logits = F.linear(*leaves).flatten(0, -2)
    given = {**options, **({"weight": cw} if "weight" in options else {})}
    loss = F.cross_entropy(logits, target.flatten(), **given)
    backward(loss)
    return [loss.detach(), *[t.grad for t in leaves]]


def linear_sharded(mesh, placements, x, w, b, target, cw, options, call=linear_cross_entropy, chunk=5):
    px, pw, pt = placements
    target = ignoring(target, options)
    leaves = [distribute_tensor(t, mesh, p).requires_grad_() for t, p in ((x, px), (w, pw), (b, pw))]
    given = {k: v for k, v in options.items() if k != "weight"}
    if "weight" in options:
        given["class_weight"] = distribute_tensor(cw, mesh, None)
    loss = call(leaves[0], leaves[1], distribute_tensor(target, mesh, pt), leaves[2], chunk=chunk, **given)
    backward(loss)
    return [loss.full_tensor().detach().flatten() if loss.dim() else loss.full_tensor().detach()] + [
        t.grad.full_tensor() for t in leaves
    ]


@pytest.mark.parametrize("classes", [V, 7])
@with_threads(2)
def test_linear_cross_entropy(rank, classes):
    mesh = init_device_mesh("cpu", (2,))
    for options in OPTIONS:
        for shape in ((N,), (3, 4)):
            given = (*linear_values(classes, shape), options)
            right = linear_dense(*given)
            for placements in (
                ([Replicate()], [Shard(0)], [Replicate()]),
                ([Shard(0)], [Replicate()], [Shard(0)]),
                ([Shard(0)], [Shard(0)], [Shard(0)]),
            ):
                for found, r in zip(linear_sharded(mesh, placements, *given), right):
                    torch.testing.assert_close(found, r)


@with_threads(4)
def test_linear_cross_entropy_on_two_axes_and_without_classes_somewhere(rank):
    mesh = init_device_mesh("cpu", (2, 2))
    placements = [Shard(0), Replicate()], [Replicate(), Shard(0)], [Shard(0), Replicate()]
    given = (*linear_values(V), OPTIONS[5])
    for found, right in zip(linear_sharded(mesh, placements, *given), linear_dense(*given)):
        torch.testing.assert_close(found, right)
    flat = init_device_mesh("cpu", (4,))
    given = (*linear_values(3), {})
    for found, right in zip(
        linear_sharded(flat, ([Replicate()], [Shard(0)], [Replicate()]), *given), linear_dense(*given)
    ):
        torch.testing.assert_close(found, right)


@with_threads(2)
def test_what_linear_cross_entropy_communicates_and_holds(rank):
    mesh = init_device_mesh("cpu", (2,))
    x, w, _, target, _ = linear_values(V)
    largest = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            largest.extend(t.numel() for t in tree_leaves(out) if type(t) is torch.Tensor)
            return out

    dx = distribute_tensor(x, mesh, [Replicate()]).requires_grad_()
    dw = distribute_tensor(w, mesh, [Shard(0)]).requires_grad_()
    dt = distribute_tensor(target, mesh, [Replicate()])
    with CountCollectives() as counted:
        loss = linear_cross_entropy(dx, dw, dt, chunk=4)
    assert [(c.op, c.bytes) for c in counted.collectives] == [("all_reduce", N * 4), ("all_reduce", 2 * N * 4)]
    with Sizes(), CountCollectives() as counted:
        loss.backward()
    assert not counted.collectives
    assert dx.grad is not None
    assert max(largest) <= max(N * D, 4 * V), "no logits of all samples"


@with_threads(2)
def test_torchs_own_function_and_wrong_arguments(rank):
    mesh = init_device_mesh("cpu", (2,))
    x, w, b, target, cw = linear_values(V)
    for options in ({}, {"reduction": "none"}, {"reduction": "sum", "ignore_index": 3}):
        leaves = [
            distribute_tensor(t, mesh, p).requires_grad_()
            for t, p in ((x, [Replicate()]), (w, [Shard(0)]), (b, [Shard(0)]))
        ]
        target = ignoring(target, options)
        loss = F.linear_cross_entropy(
            leaves[0],
            leaves[1],
            distribute_tensor(target, mesh, [Replicate()]),
            linear_bias=leaves[2],
            options=torch.nn.LinearCrossEntropyOptions(batch_chunk_size=4),
            **options,
        )
        backward(loss)
        right = linear_dense(x, w, b, target, cw, options)
        for found, r in zip([loss.detach(), *[t.grad for t in leaves]], right):
            torch.testing.assert_close(found.full_tensor(), r)
    assert linear_cross_entropy(x, w, target).dim() == 0
    for args, options, message in (
        ((x, w.t(), target), {}, r"got shapes \(12, 6\), \(6, 10\) and \(12,\)"),
        ((x, w, target, b[:3]), {}, r"one number for each of 10 classes; got \(3,\)"),
        ((x, w, target), {"reduction": "max"}, r"one of none, mean, sum; got 'max'"),
        ((x, w, target), {"chunk": 0}, r"at least 1; got 0"),
        ((x, w, target.float()), {}, r"not probabilities"),
    ):
        with pytest.raises(ValueError, match=message):
            linear_cross_entropy(*args, **options)


@with_threads(2)
def test_a_plain_target_is_whole_in_the_region_of_torch(rank):
    mesh = init_device_mesh("cpu", (2,))
    made = torch.Generator().manual_seed(0)
    logits, target = torch.randn(4, 7, generator=made), torch.randint(7, (4,), generator=made)
    weight = torch.rand(7, generator=made)
    for placement in (Shard(1), Shard(0), Replicate()):
        plain, x = logits.clone().requires_grad_(), distribute_tensor(logits, mesh, [placement]).requires_grad_()
        with loss_parallel():
            loss = F.cross_entropy(x, target, weight) + torch.nn.NLLLoss()(input=x.log_softmax(1), target=target)
            loss.backward()
        expected = F.cross_entropy(plain, target, weight) + F.nll_loss(plain.log_softmax(1), target)
        expected.backward()
        torch.testing.assert_close(loss.full_tensor(), expected)
        torch.testing.assert_close(x.grad.full_tensor(), plain.grad)


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
@with_ranks(2)
def test_compiled_is_eager(rank, inner):
    mesh = init_device_mesh("cpu", (2,))

    def through_logits(x, w, t, b, chunk, **options):
        with loss_parallel():
            return F.cross_entropy(input=F.linear(x, w, b), target=t.to_local(), **options)

    for call in (through_logits, linear_cross_entropy):
        given = (*linear_values(7), {"ignore_index": 3, "label_smoothing": 0.1})
        placements = [Replicate()], [Shard(0)], [Replicate()]
        eager = linear_sharded(mesh, placements, *given, call=call)
        torch.compiler.reset()
        compiled = torch.compile(call, backend="dtensor", fullgraph=True, options={"inner": inner})
        found = linear_sharded(mesh, placements, *given, call=compiled)
        for c, e, right in zip(found, eager, linear_dense(*given)):
            torch.testing.assert_close(e, right)
            torch.testing.assert_close(c, e)
