"""`wrap_forward`: what is called around a forward, in which order, and what becomes of the module."""

import copy
import functools

import pytest
import torch
from torch import nn

from dtensor import DTensor, Replicate, Shard, distribute_module, init_device_mesh
from dtensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    fully_shard,
    parallelize_module,
)
from dtensor.parallel.modules.forward_wrapping import wrap_forward, wrapped_class
from dtensor.testing import with_threads


def takes(log, word):
    def take(module, args, kwargs):
        log.append(word)
        return (args[0] + 1, *args[1:]), kwargs

    return take


def gives(log, word):
    def give(module, args, output):
        log.append(word)
        return output * 2

    return give


class Named(nn.Module):
    def forward(self, x, *, scale=1.0):
        return x * scale


def test_the_later_functions_come_after_the_earlier_ones():
    log, module = [], Named()
    wrap_forward(module, takes(log, "take"), gives(log, "give"))
    wrap_forward(module, takes(log, "take again"))
    wrap_forward(module, None, gives(log, "give again"))
    assert module(torch.tensor(1.0), scale=10.0) == (1 + 1 + 1) * 10 * 2 * 2
    assert log == ["take", "take again", "give", "give again"]


def test_hooks_see_what_the_module_is_called_with_and_what_it_gives():
    module, seen = Named(), []
    module.register_forward_pre_hook(lambda _, args: seen.append(args[0].item()))
    wrap_forward(module, takes([], ""), gives([], ""))
    module.register_forward_hook(lambda _, args, out: seen.append((args[0].item(), out.item())))
    module(torch.tensor(1.0))
    assert seen == [1.0, (1.0, 4.0)]


def test_the_module_stays_what_it_was():
    module = nn.Linear(2, 2)
    wrap_forward(module, takes([], ""))
    assert isinstance(module, nn.Linear)
    assert repr(module) == repr(nn.Linear(2, 2))
    assert module.state_dict().keys() == nn.Linear(2, 2).state_dict().keys()
    assert wrapped_class(type(module)) is type(module) is wrapped_class(nn.Linear)
    assert type(nn.Linear(2, 2)) is nn.Linear


def test_copies_are_wrapped_too():
    module = nn.Sequential(Named())
    wrap_forward(module[0], takes([], ""), gives([], ""))
    for other in (copy.deepcopy(module), copy.copy(module)):
        assert other(torch.tensor(1.0)) == 4.0


def test_a_forward_that_the_user_has_put_on_the_module_is_wrapped():
    module = Named()
    module.forward = functools.partial(lambda module, x: x * 10, module)
    wrap_forward(module, takes([], ""), gives([], ""))
    for m in (module, copy.deepcopy(module)):
        assert m(torch.tensor(1.0)) == 40.0
    assert type(module) is Named


def test_a_forward_that_the_user_puts_on_the_module_later_may_call_the_wrapped_one():
    module = Named()
    wrap_forward(module, takes([], ""), gives([], ""))
    inner = module.forward
    module.forward = lambda x: inner(x) + 100
    assert module(torch.tensor(1.0)) == 104.0


@with_threads(1)
def test_input_and_output_functions_may_give_nothing_or_one_value(rank):
    mesh, x = init_device_mesh("cpu", (1,)), torch.ones(2)
    nothing = distribute_module(Named(), mesh, None, lambda m, inputs, _: None, lambda m, output, _: None)
    assert torch.equal(nothing(x, scale=3.0), x * 3)
    one = distribute_module(Named(), mesh, None, lambda _, inputs, __: inputs[0] + 1)
    assert torch.equal(one(x), x + 1)


STYLES = {
    "linear": ColwiseParallel,
    "out": RowwiseParallel,
    "norm": SequenceParallel,
    "given": lambda: PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate()),
    "taken": lambda: PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Replicate()),
}


@with_threads(2)
def test_no_style_leaves_a_hook_which_dynamo_traces_slowly(rank):
    parts = [nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Identity(), nn.Identity()]
    module = nn.ModuleDict(dict(zip(STYLES, parts)))
    parallelize_module(module, init_device_mesh("cpu", (2,)), {name: make() for name, make in STYLES.items()})
    for part in module.children():
        assert not part._forward_hooks
        assert not part._forward_pre_hooks
        assert "_dtensor_wrapped" in vars(part)


@pytest.mark.parametrize("wrap", ["styles", "fully_shard"])
@with_threads(1)
def test_modules_of_many_classes_compile_one_by_one(rank, wrap):
    mesh = init_device_mesh("cpu", (1,))
    torch.compiler.reset()
    for k in range(torch._dynamo.config.recompile_limit + 2):
        module = type(f"Named{k}", (Named,), {"forward": lambda self, x, k=k: x * k})()
        if wrap == "styles":
            wrap_forward(module, takes([], ""), gives([], ""))
        else:
            fully_shard(module, mesh)
        found = torch.compile(module, backend="eager", fullgraph=True)(torch.tensor(1.0))
        assert found == (4 * k if wrap == "styles" else k)


DENSE = nn.Linear(4, 6)


@pytest.mark.parametrize("order", ["style, shard", "shard, style"])
@with_threads(4)
def test_beside_fully_shard_and_in_its_copies(rank, order):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    module = copy.deepcopy(DENSE)
    for word in order.split(", "):
        if word == "style":
            parallelize_module(module, mesh["tp"], ColwiseParallel(output_layouts=Replicate()))
        else:
            fully_shard(module, mesh["dp"])
    x = torch.arange(8.0).view(2, 4)
    for m in (module, copy.deepcopy(module)):
        out = m(x)
        assert not isinstance(out, DTensor)
        torch.testing.assert_close(out, DENSE(x))


@with_threads(4)
def test_a_module_that_joins_another_unit_stays_wrapped(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    module = nn.Sequential(copy.deepcopy(DENSE))
    fully_shard(module, mesh["dp"])
    parallelize_module(module[0], mesh["tp"], ColwiseParallel(output_layouts=Replicate()))
    fully_shard(module[0], mesh["dp"])
    x = torch.arange(8.0).view(2, 4)
    torch.testing.assert_close(module(x), DENSE(x))
