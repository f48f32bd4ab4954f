"""Each style on two gloo ranks, eager and compiled, against the plain module: output and every gradient."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from dtensor.layout.placements import Replicate, Shard
from dtensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from dtensor.tensor.factories import distribute_tensor
from dtensor.tensor.tensor import DTensor
from dtensor.testing import MLPModule, MLPStacked, ModelArgs, RMSNorm, Transformer, with_ranks

NPROC = 2
R, S = Replicate, Shard
REPLICATED = Replicate()


class Mix(nn.Module):
    """Two positional inputs, one of them no tensor, and a keyword."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 6)

    def forward(self, x, factor, *, shift):
        return self.linear(x) * factor + shift


class Two(nn.Module):
    """Two outputs, the second no tensor."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 6)

    def forward(self, x):
        return self.linear(x), 3


@dataclass
class Case:
    """A module, the plan to shard it by, its global inputs, and the layouts of those that are plain tensors.

    `plan` may be a function that shards the module over a mesh.
    """

    build: Callable[[], nn.Module]
    plan: Any
    inputs: tuple
    layouts: tuple = (REPLICATED,)
    output: Any = REPLICATED
    kwargs: dict = field(default_factory=dict)
    compiled: bool = False


def tokens(vocab, *shape):
    return torch.arange(torch.Size(shape).numel()).view(shape) * 7 % vocab


def values(*shape):
    return torch.linspace(-2, 3, torch.Size(shape).numel()).sin().view(shape)


def transformer(**options):
    return lambda: Transformer(ModelArgs(dropout_p=0.0, n_layers=1, **options))


def sharded_transformer(use_seq_parallel):
    return lambda module, mesh: Transformer.parallelize(module, mesh, use_seq_parallel)


MIX_INPUT = {
    "input_layouts": (S(0), None),
    "desired_input_layouts": (R(), None),
    "input_kwarg_layouts": {"shift": R()},
    "desired_input_kwarg_layouts": {"shift": S(-1)},
}
MIX_PLAN = {"linear": ColwiseParallel(use_local_output=False)}
MLP_PLAN = {"net1": ColwiseParallel(), "net2": RowwiseParallel()}

CASES = {
    "colwise linear": Case(lambda: nn.Linear(8, 6), ColwiseParallel(), (values(3, 8),), output=S(-1)),
    "colwise linear, input S(0)": Case(
        lambda: nn.Linear(8, 6), ColwiseParallel(input_layouts=S(0)), (values(4, 8),), (S(0),), S(-1)
    ),
    "colwise linear, output R": Case(lambda: nn.Linear(8, 6), ColwiseParallel(output_layouts=R()), (values(3, 8),)),
    "colwise linear, output S(0)": Case(
        lambda: nn.Linear(8, 6), ColwiseParallel(output_layouts=S(0)), (values(4, 8),), output=S(0)
    ),
    "colwise linear, no bias, uneven": Case(
        lambda: nn.Linear(8, 5, bias=False), ColwiseParallel(use_local_output=False), (values(3, 8),), output=None
    ),
    "colwise embedding": Case(lambda: nn.Embedding(9, 6), ColwiseParallel(), (tokens(9, 2, 5),), output=S(-1)),
    "rowwise linear": Case(lambda: nn.Linear(8, 6), RowwiseParallel(), (values(3, 8),), (S(-1),)),
    "rowwise linear, output S(0)": Case(
        lambda: nn.Linear(8, 6), RowwiseParallel(output_layouts=S(0)), (values(4, 8),), (S(-1),), S(0)
    ),
    "rowwise linear, input R, no bias": Case(
        lambda: nn.Linear(8, 6, bias=False), RowwiseParallel(input_layouts=R()), (values(3, 8),)
    ),
    "rowwise embedding": Case(lambda: nn.Embedding(9, 6), RowwiseParallel(), (tokens(9, 2, 5),), compiled=True),
    "rowwise embedding, output S(1)": Case(
        lambda: nn.Embedding(8, 6), RowwiseParallel(output_layouts=S(1)), (tokens(8, 2, 4),), output=S(1)
    ),
    "mlp": Case(lambda: MLPModule("cpu"), MLP_PLAN, (values(3, 10),), compiled=True),
    "mlp, sequence": Case(
        lambda: MLPModule("cpu"),
        {"net1": ColwiseParallel(input_layouts=S(0)), "net2": RowwiseParallel(output_layouts=S(0))},
        (values(4, 10),),
        (S(0),),
        S(0),
    ),
    "stacked mlp": Case(
        lambda: MLPStacked("cpu"),
        {"layers.*.net1": ColwiseParallel(), "layers.[01].n?t2": RowwiseParallel()},
        (values(3, 10),),
    ),
    "sequence layer norm": Case(
        lambda: nn.LayerNorm(6), SequenceParallel(), (values(2, 4, 6),), (S(1),), None, compiled=True
    ),
    "sequence rms norm, dim 0, local": Case(
        lambda: RMSNorm(6), SequenceParallel(sequence_dim=0, use_local_output=True), (values(4, 6),), (S(0),), S(0)
    ),
    "sequence torch rms norm": Case(lambda: nn.RMSNorm(6), SequenceParallel(), (values(2, 4, 6),), (S(1),), None),
    "prepare input": Case(
        Mix,
        {"": PrepareModuleInput(**MIX_INPUT), **MIX_PLAN},
        (values(4, 8), 3),
        (S(0), None),
        None,
        {"shift": values(6)},
        compiled=True,
    ),
    "prepare output": Case(
        Two,
        {
            **MIX_PLAN,
            "": PrepareModuleOutput(output_layouts=(S(-1), None), desired_output_layouts=(S(0), None)),
        },
        (values(4, 8),),
        output=S(0),
    ),
    "prepare input and output": Case(
        Mix,
        {
            **MIX_PLAN,
            "": PrepareModuleInputOutput(**MIX_INPUT, output_layouts=S(-1), desired_output_layouts=R()),
        },
        (values(4, 8), 3),
        (S(0), None),
        kwargs={"shift": values(6)},
        compiled=True,
    ),
    "transformer": Case(transformer(), sharded_transformer(False), (tokens(8, 2, 16),)),
    "transformer, sequence": Case(transformer(), sharded_transformer(True), (tokens(8, 2, 16),), compiled=True),
    "transformer, untied, checkpointed": Case(
        transformer(weight_tying=False, checkpoint_activations=True),
        sharded_transformer(True),
        (tokens(8, 2, 16),),
    ),
}
RUNS = [(name, False) for name in CASES] + [(name, True) for name, case in CASES.items() if case.compiled]


def first(outputs):
    return outputs[0] if isinstance(outputs, tuple) else outputs


def built(case):
    torch.manual_seed(3)
    return case.build()


def leaf(x):
    return x.detach().clone().requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def backward(output):
    (output * values(*output.shape)).sum().backward()


def expected(case):
    """Output, gradients of the parameters by name, and of the inputs, of the plain module."""
    module, inputs = built(case), [leaf(x) for x in case.inputs]
    output = first(module(*inputs, **case.kwargs))
    backward(output)
    grads = {name: p.grad for name, p in module.named_parameters()}
    return output.detach(), grads, [getattr(x, "grad", None) for x in inputs]


def local(x, layout, mesh):
    return leaf(distribute_tensor(x, mesh, [layout]).to_local()) if isinstance(x, torch.Tensor) else x


def whole(x, layout, mesh):
    return (x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [layout])).full_tensor()


def computed(case, mesh, compiled):
    """The same of the sharded module, put together from its shards."""
    module = built(case)
    if callable(case.plan):
        case.plan(module, mesh)
    else:
        parallelize_module(module, mesh, case.plan)
    inputs = [local(x, layout, mesh) for x, layout in zip(case.inputs, case.layouts)]
    run = torch.compile(module, backend="aot_eager", fullgraph=True) if compiled else module
    output = first(run(*inputs, **case.kwargs))
    assert isinstance(output, DTensor) == (case.output is None)
    output = whole(output, case.output, mesh)
    backward(output)
    assert any(isinstance(p, DTensor) for p in module.parameters())
    grads = {name: whole(p.grad, R(), mesh) for name, p in module.named_parameters()}
    in_grads = [
        whole(x.grad, layout, mesh) if getattr(x, "grad", None) is not None else None
        for x, layout in zip(inputs, case.layouts)
    ]
    return output.detach(), grads, in_grads


@pytest.mark.parametrize(("name", "compiled"), RUNS)
@with_ranks(NPROC)
def test_as_the_plain_module(rank, name, compiled):
    want = expected(CASES[name])
    got = computed(CASES[name], init_device_mesh("cpu", (NPROC,), mesh_dim_names=("tp",)), compiled)
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-5)
    for given, wanted in zip(got[2], want[2]):
        assert (given is None) == (wanted is None)
        if given is not None:
            torch.testing.assert_close(given, wanted, rtol=1e-5, atol=1e-5)
