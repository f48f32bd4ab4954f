"""Plans that do not fit the code of a model: the error says which module, which entries, and what to write instead."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import library, nn

from dtensor import MisfitError, ShardingError
from dtensor.comm import collectives
from dtensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module


class Attention(nn.Module):
    """Three heads; `by` is how its code cuts the features into them."""

    def __init__(self, by):
        super().__init__()
        self.by = by
        self.wq, self.wo = nn.Linear(48, 48), nn.Linear(48, 48)

    def forward(self, x):
        if self.by == "raises":
            raise RuntimeError("a word of its own")
        q = self.wq(x).view(2, 8, *((3, 16) if self.by == "heads" else (-1, 16)))
        return self.wo(q.sin().flatten(2))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(48, 96), nn.Linear(96, 48)

    def forward(this, x):  # pyright: ignore[reportSelfClsParameterName]
        return this.b(this.a(x).relu())


class Block(nn.Module):
    def __init__(self, by):
        super().__init__()
        self.attention, self.mlp = Attention(by), MLP()

    def forward(self, x):
        return x + self.mlp(x + self.attention(x))


COLUMNS, ROWS = ColwiseParallel(), RowwiseParallel()
HEADS = {"*.attention.wq": COLUMNS, "*.attention.wo": ROWS}
PROGRAMS = {
    "three heads": ("heads", HEADS, r"0\.attention \(Attention\): shape '\[2, 8, 3, 16\]' is invalid"),
    "heads of a size": ("size", HEADS, r"0\.attention \(Attention\): shape '\[2, 8, -1, 16\]' is invalid"),
    "columns twice": ("size", {"*.mlp.a": COLUMNS, "*.mlp.b": COLUMNS}, r"0\.mlp \(MLP\): .*\[16, 48\] X \[96, 48\]"),
    "rows of the whole": ("size", {"*.mlp.b": ROWS}, r"0\.mlp \(MLP\): .*\[16, 192\] X \[96, 48\]"),
    "columns alone": ("size", {"*.mlp.a": COLUMNS}, r"0\.mlp \(MLP\): .*16(, |x)48\]? .*96(, |x)48"),
}
SIZES = r"with \[(24, 48|48, 48|48, 24|24, 96)\] of a weight \[(48|96), (48|96)\]"


def model(by, plan, mesh):
    return parallelize_module(nn.Sequential(Block(by), Block(by)), mesh, plan)


@pytest.mark.parametrize("how", ["eager", "compiled", "one graph", "layer by layer"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_error_names_module_entry_sizes_and_the_way_out(program, how, fake_mesh):
    by, plan, said = PROGRAMS[program]
    mesh = fake_mesh(2)
    if how == "layer by layer":
        built = nn.Sequential(Block(by), Block(by))
        plan = {name.removeprefix("*."): style for name, style in plan.items()}
        said = said.replace(r"0\.", "")
        for block in built:
            parallelize_module(block, mesh, plan)
    else:
        built = model(by, plan, mesh)
    if how in ("compiled", "one graph"):
        built = torch.compile(built, backend="dtensor", fullgraph=how == "one graph")
    with pytest.raises(MisfitError, match=f"(?s)the plan of parallelize_module does not fit {said}") as caught:
        built(torch.randn(2, 8, 48))
    (entry, style), *_ = plan.items()
    by_entry = f" by '{entry}'" if "*" in entry else ""
    name = entry.replace("*", "0")
    assert f"{name} is {type(style).__name__}{by_entry}, with [" in str(caught.value)
    assert "distribute_model" in str(caught.value)
    caught.match(SIZES)


def test_errors_that_are_not_of_the_plan_stay_as_they_are(fake_mesh):
    mesh = fake_mesh(2)
    built = model("raises", HEADS, mesh)
    with pytest.raises(RuntimeError, match=r"^a word of its own$"):
        built(torch.randn(2, 8, 48))
    plain = nn.Sequential(nn.Linear(4, 4), model("size", {"*.mlp.a": COLUMNS, "*.mlp.b": ROWS}, mesh))
    with pytest.raises(RuntimeError, match=r"^(addmm: )?mat1 and mat2 shapes cannot be multiplied"):
        plain(torch.randn(2, 8, 5))
    function = torch.compile(lambda x: x.view(7), backend="aot_eager")  # its first argument is no module
    with pytest.raises(RuntimeError, match=r"shape '\[7\]' is invalid"):
        function(torch.ones(8))


def test_an_error_of_a_collective_stays_as_it_is(fake_mesh, monkeypatch):
    """When another rank has died; the plan is right."""

    def broken(*args):
        return torch.ones(2).view(3)  # raised by torch, as an error of gloo is

    built = model("size", {"*.mlp.a": COLUMNS, "*.mlp.b": ROWS}, fake_mesh(2))
    monkeypatch.setattr(collectives, "c10d", SimpleNamespace(all_reduce=broken))
    with pytest.raises(RuntimeError, match=r"^shape '\[3\]' is invalid"):
        built(torch.randn(2, 8, 48))


@library.custom_op("misfit::untraced", mutates_args=())
def untraced(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@untraced.register_fake
def _(x):
    raise NotImplementedError("unknown to traces")


def test_what_breaks_a_graph_breaks_it_under_a_plan(fake_mesh):
    """It comes to Dynamo as an error of a class of its own."""

    class Broken(MLP):
        def forward(self, x):
            return super().forward(untraced(x))

    built = parallelize_module(Broken(), fake_mesh(2), {"a": COLUMNS, "b": ROWS})
    assert torch.compile(built, backend="dtensor", options={"inner": "aot_eager"})(torch.randn(8, 48)).shape == (8, 48)


def test_a_style_for_the_module_itself(fake_mesh):
    class Nothing(ParallelStyle):
        def apply(self, module, device_mesh):
            return module

    mesh = fake_mesh(2)
    built = parallelize_module(nn.Linear(4, 4), mesh, COLUMNS)
    with pytest.raises(RuntimeError, match=r"not fit Linear: .*the module itself is ColwiseParallel, with \[2, 4\]"):
        built(torch.randn(2, 5))
    with pytest.raises(RuntimeError, match="the module itself is Nothing"):
        parallelize_module(nn.Linear(4, 4), mesh, Nothing())(torch.randn(2, 5))


def test_copies_and_plans_one_after_the_other(fake_mesh):
    """The second plan goes onto the same module; its entries are listed too."""
    mesh = fake_mesh(2)
    built = model("size", {"*.mlp.a": COLUMNS, "*.mlp.b": ROWS}, mesh)
    parallelize_module(built, mesh, HEADS)
    for module in (built, copy.deepcopy(built)):
        with pytest.raises(ShardingError, match=r"0\.attention \(Attention\).*0\.attention\.wq is ColwiseParallel"):
            module(torch.randn(2, 8, 48))
