"""The collectives of torch refuse DTensors, by all ways to call them, and say what to write."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn

from dtensor import OperatorError, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from dtensor.dispatch.decision import COLLECTIVES
from dtensor.tensor.tensor import DTensor
from dtensor.testing import with_ranks

SAYS = r"was given a DTensor.*x\.full_tensor\(\).*x\.redistribute\(placements=.*x\.to_local\(\)"

CALLS = {
    "all_gather": lambda x, p, other: dist.all_gather([p, p], x),
    "all_gather_into": lambda x, p, other: dist.all_gather_into_tensor(p, x),
    "all_gather_lists": lambda x, p, other: dist.all_gather([x, x], p),
    "all_reduce": lambda x, p, other: dist.all_reduce(x),
    "all_reduce_async": lambda x, p, other: dist.all_reduce(x, async_op=True),
    "all_reduce_coalesced": lambda x, p, other: dist.all_reduce_coalesced([x]),
    "all_reduce_of_nn": lambda x, p, other: torch.distributed.nn.all_reduce(x),
    "all_to_all": lambda x, p, other: dist.all_to_all([p, p], [x, x]),
    "all_to_all_single": lambda x, p, other: dist.all_to_all_single(p, x),
    "broadcast": lambda x, p, other: dist.broadcast(x, 0),
    "gather": lambda x, p, other: dist.gather(x, None if other == 0 else [p, p]),
    "irecv": lambda x, p, other: dist.irecv(x, other),
    "isend": lambda x, p, other: dist.isend(x, other),
    "p2p": lambda x, p, other: dist.batch_isend_irecv([dist.P2POp(dist.isend, x, other)]),
    "recv": lambda x, p, other: dist.recv(x, other),
    "reduce": lambda x, p, other: dist.reduce(x, 0),
    "reduce_scatter": lambda x, p, other: dist.reduce_scatter(x, [p, p]),
    "reduce_scatter_into": lambda x, p, other: dist.reduce_scatter_tensor(x, p),
    "reduce_scatter_lists": lambda x, p, other: dist.reduce_scatter(p, [x, x]),
    "reduce_scatter_of": lambda x, p, other: dist.reduce_scatter_tensor(p, x),
    "scatter": lambda x, p, other: dist.scatter(x, None if other == 0 else [p, p]),
    "send": lambda x, p, other: dist.send(x, other),
    "functional all_gather": lambda x, p, other: functional.all_gather_tensor(x, 0, dist.group.WORLD),
    "functional all_reduce": lambda x, p, other: functional.all_reduce(x, "sum", dist.group.WORLD),
    "functional all_to_all": lambda x, p, other: functional.all_to_all_single(x, None, None, dist.group.WORLD),
    "functional broadcast": lambda x, p, other: functional.broadcast(x, 0, dist.group.WORLD),
    "functional reduce_scatter": lambda x, p, other: functional.reduce_scatter_tensor(x, "sum", 0, dist.group.WORLD),
    "with gradient": lambda x, p, other: functional.all_gather_tensor_autograd(x, 0, dist.group.WORLD),
}

COMPILED = ("all_gather_into", "all_reduce", "functional all_reduce", "reduce_scatter_of")


WRITES = ("all_gather_lists", "reduce_scatter_into")
"""What Dynamo writes as a collective on plain tensors, and copies, which have an error of their own."""


def refused(call, x, rank):
    warnings.simplefilter("ignore", FutureWarning)  # of torch, that functions have other names
    with pytest.raises(OperatorError, match=SAYS):
        call(x, torch.zeros(4, 4), 1 - rank)


@with_ranks(2)
def test_each_says_what_to_write(rank):
    mesh = init_device_mesh("cpu", (2,))
    for placement in (Shard(0), Replicate(), Partial()):
        for call in CALLS.values():
            refused(call, distribute_tensor(torch.ones(4, 4), mesh, [placement]), rank)
    dist.barrier()  # nobody is left waiting


def compiled(rank, names):
    x = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (2,)), [Shard(0)])
    for name in names:
        torch.compiler.reset()
        refused(torch.compile(CALLS[name], backend="dtensor", options={"inner": "aot_eager"}), x, rank)
    dist.barrier()


@with_ranks(2)
def test_each_does_so_in_compiled_code(rank):
    compiled(rank, COMPILED)


@pytest.mark.nightly
@with_ranks(2)
def test_all_do_so_in_compiled_code(rank):
    compiled(rank, [name for name in CALLS if name not in COMPILED + WRITES])


@with_ranks(1)
def test_no_operator_is_left_out(rank):
    """DTensors for all tensors, as the dispatcher hands them on."""
    x = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (1,)), [Shard(0)])
    given = {"Tensor": x, "List[Tensor]": [x], "List[List[Tensor]]": [[x]]}
    tried = 0
    for schema in torch._C._jit_get_all_schemas():
        values = {a: given[str(a.type)] for a in schema.arguments if str(a.type) in given}
        if not schema.name.startswith(COLLECTIVES) or not values:
            continue
        space, name = schema.name.split("::")
        op = getattr(getattr(getattr(torch.ops, space), name), schema.overload_name or "default")
        args = tuple([values.get(a, 0) for a in schema.arguments if not a.kwarg_only])
        kwargs = {a.name: values.get(a, 0) for a in schema.arguments if a.kwarg_only}
        with pytest.raises(OperatorError, match=SAYS):
            DTensor.__torch_dispatch__(op, (DTensor,), args, kwargs)
        tried += 1
    assert tried > 40
