"""What changed between making a package and loading it: each refusal says what, in the terms of the program."""

import warnings
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dtensor.compile
from dtensor import PackageError, Replicate, Shard, distribute_tensor, init_device_mesh
from dtensor.compile.packages.refusals import place
from dtensor.compile.recording.imagined import imagined

FACTOR = 2.0
RATES = {"a": 1.0}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.act, self.fn = nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU(), torch.relu

    def forward(self, x):
        return self.fn(self.act(self.norm(self.up(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.scale, self.causal, self.mode, self.sizes, self.options = 2.0, True, "mean", [8, 16], {"a": 1}
        self.register_buffer("table", torch.ones(8))

    def forward(self, x, mask=None, *, factor=1.0, extras=(1, 2), rates=RATES):
        for layer in self.layers:
            x = layer(x)
        x = x * self.scale * factor * FACTOR * extras[0] * len(extras) * rates["a"]
        x = x * self.table * self.sizes[0] * self.options["a"]
        if mask is not None:
            x = x * mask
        if self.causal and self.training:
            x = x + 1
        return x.mean() if self.mode == "mean" else x.sum()


class Other(Model):
    pass


@contextmanager
def job():
    torch._dynamo.reset()
    with imagined({"tp": 2}, as_backend=True):
        dist.init_process_group("gloo")
        try:
            yield init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        finally:
            dist.destroy_process_group()


def program(mesh, change=lambda run: None):
    """Compile and call the model. `change` is given what it is called with."""
    run = SimpleNamespace(
        mesh=mesh, model=Model(), x=sharded(mesh), given={}, within=nullcontext(), plain=(), after=lambda model: None
    )
    change(run)
    for name, t in [*run.model.named_parameters(), *run.model.named_buffers()]:
        path, _, leaf = name.rpartition(".")
        if name not in run.plain:
            whole = distribute_tensor(t.detach(), mesh, [Replicate()])
            is_parameter = isinstance(t, nn.Parameter)
            new = nn.Parameter(whole, requires_grad=t.requires_grad) if is_parameter else whole
            setattr(run.model.get_submodule(path), leaf, new)
    run.after(run.model)
    with run.within, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the graph's inputs are not what they were
        torch.compile(run.model, dynamic=False)(run.x, **run.given)


def sharded(mesh, *shape, dtype=torch.float32, placement=None):
    return distribute_tensor(torch.ones(shape or (4, 8), dtype=dtype), mesh, [placement or Shard(0)])


def on(change):
    return lambda run: change(run.model)


def given(**arguments):
    return lambda run: run.given.update(arguments)


def x(**options):
    shape = options.pop("shape", (4, 8))
    return lambda run: setattr(run, "x", sharded(run.mesh, *shape, **options))


def within(context):
    return lambda run: setattr(run, "within", context())


@contextmanager
def other_default():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def other_factor():
    global FACTOR
    FACTOR = 3.0
    try:
        yield
    finally:
        FACTOR = 2.0


def hook(module, args, result):
    return result


def other_weight(run):
    weight = nn.Parameter(distribute_tensor(torch.ones(8, 8), run.mesh, [Shard(0)]))
    run.after = lambda model: setattr(model.layers[0].up, "weight", weight)


def transposed(run):
    run.x = distribute_tensor(torch.ones(8, 4), run.mesh, [Shard(1)]).t()


D = "a DTensor of float32"
CALL, MODEL = "call it so in the program that is packaged, too", "make the package again, from the model as it is now"
PLACE = "make the package again, with the call in the same place"

CHANGES = {
    "the batch": (x(shape=(6, 8)), f"the argument x was {D}[4, 8] S(0), and is {D}[6, 8] S(0); {CALL}"),
    "its dims": (x(shape=(2, 4, 8)), f"the argument x was {D}[4, 8] S(0), and is {D}[2, 4, 8] S(0); {CALL}"),
    "its dtype": (
        x(dtype=torch.float64),
        f"the argument x was {D}[4, 8] S(0), and is a DTensor of float64[4, 8] S(0); {CALL}",
    ),
    "its placement": (x(placement=Replicate()), f"the argument x was {D}[4, 8] S(0), and is {D}[4, 8] R; {CALL}"),
    "its kind": (
        lambda run: setattr(run, "x", torch.ones(4, 8)),
        f"the argument x was {D}[4, 8] S(0), and is a plain tensor of float32[4, 8]; {CALL}",
    ),
    "its gradient": (
        lambda run: run.x.requires_grad_(),
        f"the argument x was a tensor that requires no gradient, and is a tensor that requires a gradient; {CALL}",
    ),
    "its strides": (
        transposed,
        f"the argument x was a tensor with strides (8, 1), and is a tensor with strides (1, 4); {CALL}",
    ),
    "another argument": (
        lambda run: run.given.update(mask=sharded(run.mesh)),
        f"the argument mask was None, and is {D}[4, 8] S(0); {CALL}",
    ),
    "a number": (given(factor=3.0), f"the argument factor was 1.0, and is 3.0; {CALL}"),
    "a type": (given(factor=1), f"the argument factor was 1.0, and is 1; {CALL}"),
    "a length": (
        given(extras=(1, 2, 3)),
        f"the argument extras was a tuple of 2 items, (1, 2), and is a tuple of 3 items, (1, 2, 3); {CALL}",
    ),
    "an item": (given(extras=(5, 2)), f"the argument extras[0] was 1, and is 5; {CALL}"),
    "a value": (given(rates={"a": 2.0}), f"the argument rates['a'] was 1.0, and is 2.0; {CALL}"),
    "an attribute": (on(lambda m: setattr(m, "scale", 3.0)), f"scale of the model was 2.0, and is 3.0; {MODEL}"),
    "a flag": (on(lambda m: setattr(m, "causal", False)), f"causal of the model was True, and is False; {MODEL}"),
    "a text": (on(lambda m: setattr(m, "mode", "sum")), f"mode of the model was 'mean', and is 'sum'; {MODEL}"),
    "a list": (
        on(lambda m: setattr(m, "sizes", [8])),
        f"sizes of the model was a list of 2 items, [8, 16], and is a list of 1 items, [8]; {MODEL}",
    ),
    "an entry": (on(lambda m: m.options.update(a=2)), f"options['a'] of the model was 1, and is 2; {MODEL}"),
    "the class of a module": (
        on(lambda m: setattr(m.layers[1], "act", nn.GELU())),
        f"the module layers.1.act was a ReLU, and is a GELU; {MODEL}",
    ),
    "a function": (
        on(lambda m: setattr(m.layers[0], "fn", torch.sigmoid)),
        f"fn of the module layers.0 was torch.relu, and is torch.sigmoid; {MODEL}",
    ),
    "more layers": (
        on(lambda m: m.layers.append(Block())),
        f"the module layers was a ModuleList of 2 modules, and is a ModuleList of 3 modules; {MODEL}",
    ),
    "fewer layers": (
        on(lambda m: m.layers.__delitem__(1)),
        f"the module layers was a ModuleList of 2 modules, and is a ModuleList of 1 modules; {MODEL}",
    ),
    "no bias": (
        on(lambda m: setattr(m.layers[0].up, "bias", None)),
        f"the parameter layers.0.up.bias was {D}[8] R, and is None; {MODEL}",
    ),
    "the shape of a buffer": (
        on(lambda m: setattr(m, "table", torch.ones(1))),
        f"the buffer table was {D}[8] R, and is {D}[1] R; {MODEL}",
    ),
    "the dtype of a buffer": (
        on(lambda m: setattr(m, "table", m.table.bfloat16())),
        f"the buffer table was {D}[8] R, and is a DTensor of bfloat16[8] R; {MODEL}",
    ),
    "the dtype of a parameter": (
        on(lambda m: m.layers[0].up.double()),
        f"the parameter layers.0.up.bias was {D}[8] R, and is a DTensor of float64[8] R; {MODEL}",
    ),
    "a frozen parameter": (
        on(lambda m: m.layers[0].up.weight.requires_grad_(False)),
        "the parameter layers.0.up.weight was a tensor that requires a gradient, and is a tensor that requires no "
        f"gradient; {MODEL}",
    ),
    "the plan": (other_weight, f"the parameter layers.0.up.weight was {D}[8, 8] R, and is {D}[8, 8] S(0); {MODEL}"),
    "a plain buffer": (
        lambda run: setattr(run, "plain", ("table",)),
        f"the buffer table was {D}[8] R, and is a plain tensor of float32[8]; {MODEL}",
    ),
    "evaluation": (on(lambda m: m.eval()), f"training of the model was True, and is False; {MODEL}"),
    "a constant of a module": (
        on(lambda m: setattr(m.layers[0].norm, "eps", 1e-6)),
        f"eps of the module layers.0.norm was 1e-05, and is 1e-06; {MODEL}",
    ),
    "another norm": (
        on(lambda m: setattr(m.layers[0], "norm", nn.RMSNorm(8))),
        f"the module layers.0.norm was a LayerNorm, and is a RMSNorm; {MODEL}",
    ),
    "the class of the model": (
        lambda run: setattr(run, "model", Other()),
        f"the model was a Model, and is a Other; {MODEL}",
    ),
    "a hook": (
        lambda run: setattr(run, "after", lambda m: m.layers[0].register_forward_hook(hook)),
        f"the hooks of the module layers.0 were none, and are {__name__}.hook (forward hook); make the package again",
    ),
    "no gradients": (within(torch.no_grad), f"gradients were on, and are off (torch.no_grad); {PLACE}"),
    "autocast": (
        within(lambda: torch.autocast("cpu", torch.bfloat16)),
        f"autocast was off, and is on; {PLACE}",
    ),
    "the default dtype": (
        within(other_default),
        f"the default dtype was another one than torch.float64; {PLACE}",
    ),
    "a global": (within(other_factor), f"the global FACTOR was 2.0, and is 3.0; {MODEL}"),
}

HARMLESS = {
    "a key that is not read": given(rates={"a": 1.0, "b": 2.0}),
    "evaluation of what does not read it": on(lambda m: m.layers[1].eval()),
}

BY_DAY = ("the batch", "the class of a module", "no bias", "a hook", "autocast")


@pytest.fixture(scope="module")
def made(safe_folder):
    path = safe_folder / "changes.package"
    dtensor.compile.package(program, {"tp": 2}, (), path)
    return path


def refused(path, change):
    """The text of the refusal, without the name of frame and file."""
    with job() as mesh:
        package = dtensor.compile.load(path, strict=True)
        try:
            with pytest.raises(PackageError) as error:
                program(mesh, change)
        finally:
            package.unload()
    said = f"Model.forward cannot be taken from the package {path}: "
    text = str(error.value)
    assert said in text, text
    return text.split(said)[1].split("\n")[0]


def check(path, names):
    wrong = {}
    for name in names:
        change, expected = CHANGES[name]
        found = refused(path, change)
        if found != expected:
            wrong[name] = found
    assert not wrong


def test_some_changes(made):
    check(made, BY_DAY)


@pytest.mark.nightly
def test_all_changes(made):
    check(made, CHANGES)


def test_it_says_that_it_is_used(made, capfd):
    for change in HARMLESS.values():
        with job() as mesh:
            package = dtensor.compile.load(made, strict=True)
            program(mesh, change)
            package.unload()
        assert package.taken == ["Model.forward"]
        assert capfd.readouterr().err.count(f"dtensor: Model.forward is taken from the package {made}, and not") == 1


def test_what_the_program_calls_it():
    model = Model()
    seen = {"self": model, "x": torch.ones(1), "net": model}
    path = "._modules['layers']._modules['0']"
    names = {
        "L['x']": "the argument x",
        "L['x'][0].y": "the argument x[0].y",
        "G['f']": "the global f",
        "L['self']": "the model",
        f"L['self']{path}": "the module layers.0",
        f"L['self']{path}._parameters['weight']": "the parameter layers.0.weight",
        "L['self']._buffers['table']": "the buffer table",
        f"L['self']{path}.norm.eps": "norm.eps of the module layers.0",
        f"L['net']{path}": "the module layers.0 of net",
        "L['net']": "the model of net",
        "___something": "___something",
    }
    assert {expression: place(expression, seen) for expression in names} == names
