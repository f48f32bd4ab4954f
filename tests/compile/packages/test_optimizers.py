"""Compiled steps of optimizers: taken by one whose state is empty, bit by bit the same, or compiled with a reason."""

import gc
import subprocess
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

import dtensor.compile
from dtensor import PackageError
from dtensor.parallel import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module
from dtensor.torch_private import frames
from dtensor.torch_private.training import optimizers
from tests.interpreter import python

from . import programs
from .test_fit import job
from .test_packages import compiled_here


class Model(programs.Small):
    """With parameters that get no gradient, before others that do."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 8, bias=False), nn.Linear(8, 16)
        self.unused, self.last = nn.Linear(3, 3), nn.Linear(16, 16, bias=False)

    def forward(self, x):
        y = super().forward(x)
        return self.last(y.full_tensor() if hasattr(y, "full_tensor") else y)


def sharded(sharding, mesh):
    torch.manual_seed(0)
    model = Model()
    if sharding == "tp":
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    elif sharding == "fsdp":
        fully_shard(model, mesh=mesh)
    return model


def nothing(model, optimizer):
    pass


def trained(mesh, make, sharding="tp", steps=3, first=nothing, before=nothing, after=nothing):
    """Take steps of which that of the optimizer is compiled; return the parameters and states, and the optimizer."""
    model = sharded(sharding, mesh)
    optimizer = make(model.parameters())
    first(model, optimizer)
    step = torch.compile(optimizer.step)
    for _ in range(steps):
        F.mse_loss(model(programs.batch()), programs.batch()).backward()
        before(model, optimizer)
        step()
        optimizer.zero_grad()
        after(model, optimizer)
    return held(model, optimizer), optimizer


def held(model, optimizer):
    tensors = [*model.parameters(), *[x for s in optimizer.state.values() for x in s.values() if torch.is_tensor(x)]]
    return [x.to_local() if hasattr(x, "to_local") else x.clone() for x in [t.detach() for t in tensors]]


def world(run, *args, path=None, sizes=None, **options):
    """Run in a process as if new; what it gives and has compiled, and the package if it loads one."""
    with job(sizes) as mesh:
        counters.clear()
        package = dtensor.compile.load(path, **options) if path else None
        try:
            return run(mesh, *args), compiled_here(), package
        finally:
            if package:
                package.unload()


def same(found, expected):
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def check(run, path, *args, sizes=None):
    """What is taken from a package gives what is compiled without one, and nothing is compiled."""
    sizes = sizes or {"tp": 2}
    (expected, *_), compiled, _ = world(run, *args, sizes=sizes)
    assert compiled[0] > 0
    made = dtensor.compile.package(run, sizes, args, path)
    assert made.left_out == []
    (found, *_), compiled, package = world(run, *args, path=path, sizes=sizes, strict=True)
    assert same(found, expected)
    assert compiled == (0, 0, 0)
    assert package.missed == []
    return package


AT_NIGHT = ("momentum", "adagrad", "adam", "adamw", "a rate that is a tensor")
"""By day AdamW is in the package that other tests take steps from."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.nightly] if n in AT_NIGHT else []) for n in programs.OPTIMIZERS]
)
def test_a_step(name, safe_folder, own_caches):
    check(trained, safe_folder / "step.package", programs.OPTIMIZERS[name])


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "sharding"),
    [
        ("adamw", "fsdp"),
        ("momentum", "plain"),
        ("momentum", "fsdp"),
        ("adamw", "plain"),
    ],
)
def test_other_parameters(name, sharding, safe_folder, own_caches):
    """On one rank: what others would add to a gathered parameter is not there."""
    check(trained, safe_folder / "step.package", programs.OPTIMIZERS[name], sharding, sizes={"dp": 1})


def two_groups(parameters):
    first, *rest = parameters
    return torch.optim.AdamW([{"params": [first], "lr": 0.2}, {"params": rest, "weight_decay": 0.5}], lr=0.1)


@pytest.mark.nightly
def test_two_groups(safe_folder, own_caches):
    check(trained, safe_folder / "step.package", two_groups)


def scheduled(mesh, name):
    """The rate is another number at each step; Dynamo makes a second graph, for any number."""
    schedulers = []

    def first(model, optimizer):
        schedulers.append(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))

    return trained(mesh, programs.OPTIMIZERS[name], steps=4, first=first, after=lambda *_: schedulers[0].step())


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["momentum", "adamw", "a rate that is a tensor"])
def test_a_schedule_of_rates(name, safe_folder, own_caches):
    check(scheduled, safe_folder / "step.package", name)


def whole(mesh, name):
    """Forward, backward and the optimizer's step in one function."""
    model = sharded("tp", mesh)
    optimizer = programs.OPTIMIZERS[name](model.parameters())

    @torch.compile
    def step(x):
        loss = F.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    losses = [step(programs.batch()).detach() for _ in range(3)]
    return [*losses, *held(model, optimizer)], optimizer


@pytest.mark.nightly
@pytest.mark.parametrize("name", [pytest.param("momentum", marks=pytest.mark.nightly), "adamw"])
def test_a_whole_step(name, safe_folder, own_caches):
    check(whole, safe_folder / "step.package", name)


def with_closure(mesh, name):
    model = sharded("tp", mesh)
    optimizer = programs.OPTIMIZERS[name](model.parameters())
    step, x = torch.compile(optimizer.step), programs.batch()

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x)
        loss.backward()
        return loss

    losses = [step(closure).detach() for _ in range(3)]
    return [*losses, *held(model, optimizer)], optimizer


@pytest.mark.nightly
def test_a_closure(safe_folder, own_caches):
    check(with_closure, safe_folder / "step.package", "adamw")


class Own(torch.optim.Optimizer):
    """Dynamo traces how it initializes its state, as there is no `_init_group`."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})
        self.decay = 0.9

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "mean" not in state:
                    state["mean"] = torch.zeros_like(p)
                state["mean"].mul_(self.decay).add_(p.grad)
                p.add_(state["mean"], alpha=-group["lr"])


@pytest.mark.nightly
def test_a_class_of_the_user(safe_folder, own_caches):
    check(trained, safe_folder / "step.package", Own)


ADAM = programs.OPTIMIZERS["adamw"]


@pytest.fixture(scope="module")
def made(safe_folder):
    """The package of two steps of AdamW."""
    path = safe_folder / "adamw.package"
    dtensor.compile.package(trained, {"tp": 2}, (ADAM, "tp", 2), path)
    return path


def without_gradient(model, optimizer):
    model.down.weight.grad = None


def in_another_order(model, optimizer):
    """Load a state whose keys are in another order than that in which they are initialized."""
    used = [k for k, (name, _) in enumerate(model.named_parameters()) if "unused" not in name]
    parameters = list(model.parameters())
    saved = optimizer.state_dict()
    saved["state"] = {
        k: {
            "step": torch.tensor(3.0),
            "exp_avg": torch.ones_like(parameters[k]),
            "exp_avg_sq": torch.ones_like(parameters[k]),
        }
        for k in reversed(used)
    }
    optimizer.load_state_dict(saved)


def of_another_layout(model, optimizer):
    model.last.weight.grad = model.last.weight.grad.t().contiguous().t()


def from_a_checkpoint(model, optimizer):
    """Load a state after the first step, as it is."""
    optimizer.load_state_dict(optimizer.state_dict())


DIFFERENCES = {
    "rate": (
        (lambda p: torch.optim.AdamW(p, lr=0.5),),
        {},
        r"argument self.param_groups\[0\]\['lr'\] was 0.01, and is 0.5; call it so",
    ),
    "more state": ((lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),), {}, "the state of .* max_exp_avg_sq"),
    "class": ((programs.OPTIMIZERS["adam"],), {}, r"was the optimizer .*AdamW, and is .*Adam; make the package again$"),
    "groups": ((two_groups,), {}, "that of 4 parameters, and is that of 1"),
    "no gradient": (
        (ADAM,),
        {"before": without_gradient},
        r"the state of the optimizer, the argument self, was of parameter \d: step",
    ),
    "order": (
        (ADAM,),
        {"first": in_another_order},
        r"the state of the optimizer, .* was of parameter 0.* of parameter \d",
    ),
    "layout": (
        (ADAM,),
        {"before": of_another_layout},
        r"grad was a tensor with strides \(16, 1\), and is a tensor with strides \(1, 16\)",
    ),
}


ALSO_AT_NIGHT = ("rate", "more state", "no gradient", "class", "groups")
"""What is said of the state by day is that of "order"."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.nightly] if n in ALSO_AT_NIGHT else []) for n in DIFFERENCES]
)
def test_what_does_not_fit_is_compiled(name, made, own_caches):
    (make,), options, said = DIFFERENCES[name]

    def run(mesh):
        return trained(mesh, make, "tp", 2, **options)

    (expected, *_), compiled, _ = world(run)
    (found, *_), own, package = world(run, path=made)
    assert same(found, expected)
    assert own == compiled
    reasons = dict(package.missed)
    frame = next(name for name in reasons if name.endswith(".step"))
    with pytest.raises(PackageError, match=said):
        raise PackageError(reasons[frame])


def test_a_state_that_was_loaded(made, own_caches):
    def run(mesh):
        return trained(mesh, ADAM, "tp", 2, after=from_a_checkpoint)

    (expected, *_), *_ = world(trained, ADAM, "tp", 2)
    (found, *_), compiled, _ = world(run, path=made, strict=True)
    assert same(found, expected)
    assert compiled == (0, 0, 0)


def test_a_second_optimizer_takes_it_too(made, own_caches):
    def run(mesh):
        return trained(mesh, ADAM, "tp", 2)[0], trained(mesh, ADAM, "tp", 2)[0]

    (first, second), compiled, package = world(run, path=made, strict=True)
    assert same(first, second)
    assert compiled == (0, 0, 0)
    assert package.taken.count("Adam.step") == 2


def test_the_optimizer_is_not_kept_alive(made, own_caches):
    (_, optimizer), _, _ = world(trained, ADAM, "tp", 2, path=made, strict=True)
    left = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert left() is None


class Scaled(torch.optim.Optimizer):
    """With a tensor that is not in its state."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})
        self.scale = torch.tensor(2.0)

    def _init_group(self, group, parameters, scales):
        for p in group["params"]:
            if p.grad is not None:
                parameters.append(p)
                scales.append(self.scale)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            parameters, scales = [], []
            self._init_group(group, parameters, scales)
            for p, scale in zip(parameters, scales):
                p.sub_(p.grad * scale)


def test_what_cannot_be_kept_is_named(safe_folder, own_caches):
    """As the error where nothing else was compiled, which depends on what this process has compiled before."""
    try:
        said = str(dtensor.compile.package(trained, {"tp": 2}, (Scaled, "plain"), safe_folder / "x").left_out)
    except PackageError as error:
        said = str(error)
    assert "neither a parameter, nor a gradient, nor in the optimizer's state; put it" in said


@pytest.mark.nightly
def test_what_dynamo_leaves_to_python_is_not_missed(safe_folder, own_caches):
    """A fused step: there is nothing to compile in it, and in a strict job that is no error."""

    def run(mesh):
        trained(mesh, lambda p: torch.optim.AdamW(p, lr=0.01, fused=True), "plain", 2)
        return trained(mesh, ADAM, "plain", 2)

    path = safe_folder / "fused.package"
    dtensor.compile.package(run, {"tp": 2}, (), path)
    (expected, *_), *_ = world(run)
    (found, *_), compiled, package = world(run, path=path, strict=True)
    assert same(found, expected)
    assert compiled == (0, 0, 0)
    assert package.missed == []


PROGRAM = """
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
import dtensor


def seen(*_):
    pass


model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
register_optimizer_step_pre_hook(seen)
step = torch.compile(optimizer.step)
for _ in range(2):
    model(torch.ones(2, 4)).sum().backward()
    step()
    optimizer.zero_grad()
print("steps", optimizer.state[model.weight]["step"].item())
"""


@pytest.mark.nightly
def test_the_command(safe_folder, own_caches, monkeypatch):
    """The hook that counts steps is not seen by what is compiled."""
    script, path = safe_folder / "program.py", safe_folder / "command.package"
    script.write_text(PROGRAM)

    def run(*command):
        return subprocess.run([python(), *command], capture_output=True, text=True, check=False, timeout=300)

    made = run("-m", "dtensor", "package", str(path), str(script))
    assert made.returncode == 0, made.stderr
    monkeypatch.setenv("DTENSOR_PACKAGE", str(path))
    monkeypatch.setenv("DTENSOR_PACKAGE_STRICT", "1")
    done = run(str(script))
    assert done.returncode == 0, done.stderr
    assert "steps 2.0" in done.stdout
    monkeypatch.setenv("DTENSOR_PACKAGE_STRICT", "0")
    script.write_text(PROGRAM.replace("AdamW", "Adam"))
    done = run(str(script))
    assert done.returncode == 0, done.stderr
    assert "steps 2.0" in done.stdout


def test_addresses_count_unless_something_is_recorded():
    p = nn.Parameter(torch.ones(2))
    torch._dynamo.mark_static_address(p, guard=True)
    assert frames._static_address_type(p) == "guarded"
    token = frames._recorder.set(frames.FrameRecorder())
    try:
        assert frames._static_address_type(p) == "unguarded"
    finally:
        frames._recorder.reset(token)


def test_calls_are_repeated_with_the_groups_of_another_optimizer():
    one, other = [torch.optim.Adam([nn.Parameter(torch.ones(k))], lr=0.1) for k in (2, 3)]
    call = optimizers.noted_call(one, (one.param_groups[0], [], [], [], [], [], []), {})
    p = other.param_groups[0]["params"][0]
    p.grad = torch.ones(3)
    optimizers.initialize(other, [call])
    assert other.state[p]["exp_avg"].shape == (3,)
    other.state[p]["exp_avg"].fill_(7)
    optimizers.initialize(other, [call])
    assert other.state[p]["exp_avg"].tolist() == [7, 7, 7]
    assert one.state == {}
