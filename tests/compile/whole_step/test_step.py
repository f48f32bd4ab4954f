"""A whole training step as one graph: the numbers of eager mode and of one device, whatever the optimizer and plan."""

import inspect
from contextlib import ExitStack, nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.flop_counter import FlopCounterMode

import dtensor.compile
from dtensor import DTensor, Shard, distribute_model, init_device_mesh
from dtensor.compile import Options
from dtensor.parallel import ColwiseParallel, RowwiseParallel, clip_grad_norm_, fully_shard, parallelize_module
from dtensor.testing import with_ranks, with_threads
from dtensor.torch_private.compiling import dynamo_counters
from dtensor.torch_private.training import whole_steps

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "Muon": lambda p: torch.optim.Muon([x for x in p if x.dim() == 2], lr=0.01),
}


class Model(nn.Module):
    """A perceptron with its loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.out = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 4)

    def forward(self, x, y):
        return F.cross_entropy(self.out(x + self.down(F.gelu(self.up(x)))), y)


def fsdp(model, mesh):
    for child in model.children():
        fully_shard(child, mesh)
    return fully_shard(model, mesh)


def tp(model, mesh):
    return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def view(model, mesh):
    return distribute_model(model, mesh, {"up.*": [Shard(0)], "down.weight": [Shard(1)]})


PLANS = {"fsdp": fsdp, "tp": tp, "view": view}


def batches(count, plan, rank, ranks):
    for k in range(count):
        generator = torch.Generator().manual_seed(k)
        x, y = torch.randn(8, 8, generator=generator), torch.randint(4, (8,), generator=generator)
        yield (x.chunk(ranks)[rank], y.chunk(ranks)[rank]) if plan == "fsdp" else (x, y)


def training(model, optimizer, clip=torch.nn.utils.clip_grad_norm_, parts=1):
    """The step, as a user writes it."""

    def step(x, y):
        total = 0.0
        for part, labels in zip(x.chunk(parts), y.chunk(parts)):
            loss = model(part, labels) / parts
            loss.backward()
            total = total + loss.detach()
        clip(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def rates(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (1 + k))


TOLERANCE = {"Muon": 5e-4}
"""Muon rounds to bfloat16, which makes more of the last bit of a gradient that ranks add up in another order."""


def full(model):
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach().clone() for p in model.parameters()]


def same(found, expected, tolerance):
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a, rtol=10 * tolerance, atol=tolerance)


def trained(model, given, make, options=None, clip=torch.nn.utils.clip_grad_norm_, parts=1, schedule=rates):
    """The parameters after steps for all batches, eager unless there are options, and the number of graphs."""
    optimizer = make(model.parameters())
    scheduler, step = schedule(optimizer), training(model, optimizer, clip, parts)
    step = step if options is None else dtensor.compile.step(step, options=options)
    torch.compiler.reset()
    before = dynamo_counters()["stats"]["unique_graphs"]
    for x, y in given:
        step(x, y)
        scheduler.step()
    return full(model), dynamo_counters()["stats"]["unique_graphs"] - before


def ten_steps(rank, plan, name, options, steps=10, parts=1):
    """Eager on one device, eager by the plan, and by the plan under all `options`."""
    mesh, make = init_device_mesh("cpu", (2,)), OPTIMIZERS[name]
    plain, _ = trained(Model(), batches(steps, "one", 0, 1), make, parts=parts)

    def shards(given=None):
        return trained(PLANS[plan](Model(), mesh), batches(steps, plan, rank, 2), make, given, clip_grad_norm_, parts)

    eager, graphs = shards()
    assert graphs == 0
    same(eager, plain, TOLERANCE.get(name, 1e-5))
    for given in options:
        whole, graphs = shards(given)
        same(whole, eager, 1e-5 if given == {} else 1e-6)
        assert graphs == 1, (plan, name, given)


@with_ranks(2, timeout=240)
def test_ten_steps_are_those_of_one_device(rank):
    """With clipping and a schedule; one graph, which a changed learning rate does not compile again."""
    for plan, name in (("fsdp", "SGD"), ("view", "Muon")):
        ten_steps(rank, plan, name, [{"inner": "aot_eager"}])


@pytest.mark.nightly
@with_ranks(2, timeout=240)
def test_under_inductor_and_accumulated(rank):
    ten_steps(rank, "fsdp", "AdamW", [{}], steps=5, parts=2)


@pytest.mark.nightly
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", OPTIMIZERS)
@with_ranks(2, timeout=600)
def test_every_optimizer_by_every_plan(rank, plan, name):
    # Where it fuses, Inductor computes Muon's bfloat16 in float32, on one device as well.
    ten_steps(rank, plan, name, [{"inner": "aot_eager"}, *([{}] if name != "Muon" else [])])
    ten_steps(rank, plan, name, [{"inner": "aot_eager"}], parts=2)


def one_cycle(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=12)


def test_momenta_and_betas_that_change_compile_once_more():
    for name in ("SGD", "AdamW"):
        runs = [
            trained(Model(), batches(6, "one", 0, 1), OPTIMIZERS[name], options, schedule=one_cycle)
            for options in (None, {"inner": "aot_eager"})
        ]
        (eager, _), (whole, graphs) = runs
        same(whole, eager, 1e-6)
        assert graphs == 2, name


class Mixed(torch.optim.Optimizer):
    """Calls all operators that take a number of the host which may change, and rounds after each."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.3})

    @torch.no_grad()
    def step(self):
        (group,) = self.param_groups
        (p,), lr = group["params"], group["lr"]
        x, g = p.float(), p.grad.float()
        if group.get("kernels"):
            x, g = p, p.grad
        x = x.add(g, alpha=-lr).bfloat16().to(x.dtype)
        x = x.sub(g, alpha=lr).bfloat16().to(x.dtype)
        x = x.addcmul(g, g, value=lr).bfloat16().to(x.dtype)
        x = x.addcdiv(g, g + 4, value=lr).bfloat16().to(x.dtype)
        x = x.lerp(g, lr).bfloat16().to(x.dtype)
        p.copy_(lr ** (x / 8))


def mixed(kernels):
    """The parameter after two steps."""
    torch.manual_seed(0)
    p, g = nn.Parameter(torch.zeros(64, 64).bfloat16()), torch.randn(64, 64).bfloat16()
    optimizer = Mixed([p])
    optimizer.param_groups[0]["kernels"] = kernels

    def step():
        (p * g).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step = dtensor.compile.step(step, options={"inner": "aot_eager"}) if kernels else step
    for lr in (0.2, 0.3):
        optimizer.param_groups[0]["lr"] = lr
        p.data.copy_(g * 0.7)
        step()
    return p.detach()


def test_numbers_that_change_are_taken_in_the_precision_of_kernels():
    """With bfloat16: as float32 rounded after each operator. (Torch's own kernels for CPUs round `alpha` first.)"""
    found, expected = mixed(True), mixed(False)
    assert (found != expected).float().mean() < 0.01
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-7)


EVERY = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
}
NOT_WHOLE = ("Optimizer", "LBFGS", "SparseAdam")
VARIANTS = {"foreach": True, "maximize": True, "amsgrad": True, "weight_decay": 0.1, "lr": 0.01}


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in EVERY if name not in NOT_WHOLE])
@with_ranks(2, timeout=600)
def test_all_optimizers_of_torch(rank, name):
    """Each with each of its arguments, by fsdp; one graph, though the learning rate changes."""
    mesh, kind = init_device_mesh("cpu", (2,)), EVERY[name]
    known = inspect.signature(kind).parameters
    for key in [key for key in VARIANTS if key in known]:  # in one order on all ranks

        def make(parameters, given={"lr": 0.01, key: VARIANTS[key]}):  # noqa: B006
            return kind([p for p in parameters if name != "Muon" or p.dim() == 2], **given)

        (eager, _), (whole, graphs) = (
            trained(fsdp(Model(), mesh), batches(4, "fsdp", rank, 2), make, options, clip_grad_norm_)
            for options in (None, {"inner": "aot_eager"})
        )
        same(whole, eager, 1e-5)
        assert graphs == 1, key


def test_settings_last_as_long_as_any_thread_needs_them():
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(whole_steps.whole_step())
        second.enter_context(whole_steps.whole_step())
        first.close()
        assert torch._dynamo.config.trace_autograd_ops
    assert not torch._dynamo.config.trace_autograd_ops


@with_threads(1)
def test_hooks(rank):
    """Of the optimizer itself in the graph; of all optimizers, and those that are not to be traced, after the step."""
    model, seen, own = Model(), [], []
    optimizer = OPTIMIZERS["SGD"](model.parameters())

    def freeze(optimizer, args, kwargs):
        optimizer.param_groups[0]["params"][0].grad.zero_()

    optimizer.register_step_pre_hook(freeze)
    optimizer.register_step_post_hook(
        torch.compiler.disable(lambda o, args, kwargs: own.append(float(o.param_groups[0]["lr"])))
    )
    handle = register_optimizer_step_post_hook(lambda o, args, kwargs: seen.append(o))
    before = model.up.weight.detach().clone()
    step = dtensor.compile.step(training(model, optimizer), options={"inner": "aot_eager"})
    try:
        for x, y in batches(3, "one", 0, 1):
            step(x, y)
    finally:
        handle.remove()
    assert torch.equal(model.up.weight, before)
    assert not torch.equal(model.down.weight, Model().down.weight)
    assert seen == [optimizer] * 3
    assert own == [0.1] * 3
    assert len(optimizer._optimizer_step_post_hooks) == 1
    assert step.optimizers == [optimizer]


def cleared_first():
    """A step that begins with `optimizer.zero_grad()`: a trace meets the parameters before the model's forward."""
    model = Model()
    optimizer = OPTIMIZERS["SGD"](model.parameters())

    def step(x, y):
        optimizer.zero_grad()
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, step


def test_gradients_may_be_cleared_first():
    (plain, step), (model, whole) = cleared_first(), cleared_first()
    whole = dtensor.compile.step(whole, options={"inner": "aot_eager"})
    for x, y in batches(4, "one", 0, 1):
        torch.testing.assert_close(whole(x, y), step(x, y))
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(b, a)
        torch.testing.assert_close(b.grad, a.grad)


def test_what_torch_does_not_compile_runs_eagerly():
    (_, step), (_, whole) = cleared_first(), cleared_first()
    whole = dtensor.compile.step(whole, options={"inner": "aot_eager"})
    for k, (x, y) in enumerate(batches(4, "one", 0, 1)):
        with FlopCounterMode(display=False) if k == 2 else nullcontext():
            torch.testing.assert_close(whole(x, y), step(x, y))


def test_a_backward_that_finds_nothing_is_an_error(monkeypatch):
    monkeypatch.setattr(whole_steps, "_own_leaves", lambda *_: [])
    _, step = cleared_first()
    step = dtensor.compile.step(step, options={"inner": "aot_eager"})
    x, y = next(batches(1, "one", 0, 1))
    step(x, y)
    with pytest.raises(Exception, match="finds no tensor to give a gradient to"):
        step(x, y)


def test_refusals():
    model = Model()
    with pytest.raises(TypeError, match=r"a whole training step, got.*Model.*write a function"):
        dtensor.compile.step(model)
    with pytest.raises(ValueError, match="inner"):
        dtensor.compile.step(lambda: None, options={"inner": "nothing"})
    x, y = next(batches(1, "one", 0, 1))
    lbfgs = torch.optim.LBFGS(model.parameters())

    def search():
        lbfgs.step(lambda: model(x, y))

    with pytest.raises(ValueError, match="LBFGS evaluates the model as often"):
        dtensor.compile.step(search)()
    fused = torch.optim.AdamW(model.parameters(), fused=True)
    with pytest.raises(ValueError, match=r"AdamW\(..., fused=True\) cannot be traced; leave fused out"):
        dtensor.compile.step(training(model, fused))(x, y)
    scaled = torch.optim.Adafactor(model.parameters(), lr=torch.tensor(0.1))
    with pytest.raises(ValueError, match=r"Adafactor\(lr=a tensor\).*give lr as a number"):
        dtensor.compile.step(training(model, scaled))(x, y)


def test_a_step_of_an_object_and_options_by_the_decorator():
    class Trainer:
        def __init__(self):
            self.model = Model()
            self.optimizer = OPTIMIZERS["SGD"](self.model.parameters())

        @dtensor.compile.step(options={"inner": "aot_eager"})
        def train(self, x, y):
            """One step."""
            return training(self.model, self.optimizer)(x, y)

    trainer, plain = Trainer(), Model()
    step = training(plain, OPTIMIZERS["SGD"](plain.parameters()))
    for x, y in batches(3, "one", 0, 1):
        torch.testing.assert_close(trainer.train(x, y), step(x, y))
    assert Trainer.train.__doc__ == "One step."
    assert Options.of({"inner": "aot_eager"}).inner == "aot_eager"
