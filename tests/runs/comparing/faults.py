"""Faults, one at a time: a wrong bit, a wrong shard, a forgotten reduction, and where each must be found.

A fault is a context around recorded training steps of one of the plans, on some of the ranks or all.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dtensor import DTensor
from dtensor.comm import redistribute as redistributing
from dtensor.comm.collectives import emit
from dtensor.dispatch.dispatch import forget
from dtensor.rules import RULES, rule_of

Change = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
        name: what is wrong.
        plan: the plan it is put into.
        inject: (model, optimizer, rank) -> the context in which it is wrong.
        module: the module that must be named.
        op: the start of the operator's name that must be named.
        ranks: the ranks that must be named; None for all.
        phase: the phase that must be named.
        process: () -> a context around all ranks, for what the ranks of one process share.
        steps: how many steps are recorded.
    """

    name: str
    plan: str
    inject: Any
    module: str
    op: str
    ranks: tuple[int, ...] | None = None
    phase: str = ""
    process: Callable[[], AbstractContextManager[Any]] = nullcontext
    steps: int = 1


def local(x: torch.Tensor) -> torch.Tensor:
    return x._local_tensor if isinstance(x, DTensor) else x


class Wrong(TorchDispatchMode):
    """Changes the result of one call of an operator."""

    def __init__(self, op: str, nth: int, change: Change, backward: bool | None, result: int) -> None:
        super().__init__()
        self.op, self.nth, self.change, self.backward, self.result = op, nth, change, backward, result
        self.seen = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._schema.name != f"aten::{self.op}":
            return out
        in_backward = torch._C._current_autograd_node() is not None
        if self.backward is not None and in_backward != self.backward:
            return out
        made = out[self.result] if isinstance(out, (tuple, list)) else out
        if made is not None and local(made).dtype is torch.float64:
            return out  # the recorder's own
        self.seen += 1
        if self.seen - 1 == self.nth:
            made = args[0][self.result] if made is None else made
            x = local(made)
            with torch.no_grad():
                x.copy_(self.change(x.clone()))
        return out


def operator(
    op: str,
    nth: int,
    change: Change,
    ranks: Sequence[int] | None = None,
    backward: bool | None = False,
    result: int = 0,
) -> Any:
    """The `nth` call of `op` returns something else, on `ranks` or on all."""

    def inject(model: Any, optimizer: Any, rank: int) -> Any:
        if ranks is None or rank in ranks:
            return Wrong(op, nth, change, backward, result)
        return ExitStack()

    return inject


def weight(name: str, change: Change, ranks: Sequence[int] | None = None) -> Any:
    """A parameter or buffer holds something else, on `ranks` or on all."""

    @contextmanager
    def inject(model: Any, optimizer: Any, rank: int) -> Iterator[None]:
        if ranks is None or rank in ranks:
            x = local(dict([*model.named_parameters(), *model.named_buffers()])[name].data)
            with torch.no_grad():
                x.copy_(change(x.clone()))
        yield

    return inject


class Overrides(threading.local):
    """Steps of redistribution that this thread takes otherwise: name -> (before, x, *arguments) -> result."""

    def __init__(self) -> None:
        self.changes: dict[str, Callable[..., Any]] = {}


overrides = Overrides()


@contextmanager
def overridable() -> Iterator[None]:
    """A context in which threads can override steps of redistribution."""
    with ExitStack() as stack:
        for op in ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "shard"):
            stack.enter_context(mock.patch.object(redistributing.emit, op, _overridable(op, getattr(emit, op))))
        yield


def _overridable(op: str, before: Callable[..., Any]) -> Callable[..., Any]:
    def call(x: Any, *given: Any) -> Any:
        change = overrides.changes.get(op)
        return before(x, *given) if change is None else change(before, x, *given)

    return call


def collective(
    op: str, nth: int, change: Callable[..., Any], ranks: Sequence[int] | None = None, backward: bool | None = None
) -> Any:
    """The `nth` call of a step of redistribution returns something else: `change(step, x, *arguments)`."""

    @contextmanager
    def inject(model: Any, optimizer: Any, rank: int) -> Iterator[None]:
        seen = 0

        def changed(before: Any, x: Any, *given: Any) -> Any:
            nonlocal seen
            if backward is not None and (torch._C._current_autograd_node() is not None) != backward:
                return before(x, *given)
            seen += 1
            return change(before, x, *given) if seen - 1 == nth else before(x, *given)

        if ranks is None or rank in ranks:
            overrides.changes[op] = changed
        try:
            yield
        finally:
            overrides.changes.pop(op, None)

    return inject


def attribute(path: str, name: str, value: Any, ranks: Sequence[int] | None = None) -> Any:
    """An attribute of a module is something else."""

    @contextmanager
    def inject(model: Any, optimizer: Any, rank: int) -> Iterator[None]:
        if ranks is None or rank in ranks:
            setattr(model.get_submodule(path), name, value)
        yield

    return inject


def option(name: str, value: Any, ranks: Sequence[int] | None = None) -> Any:
    """An option of the optimizer is something else."""

    @contextmanager
    def inject(model: Any, optimizer: Any, rank: int) -> Iterator[None]:
        if ranks is None or rank in ranks:
            optimizer.param_groups[0][name] = value
        yield

    return inject


def gradient(name: str, change: Change, ranks: Sequence[int] | None = None) -> Any:
    """A gradient is changed before the optimizer sees it."""

    @contextmanager
    def inject(model: Any, optimizer: Any, rank: int) -> Iterator[None]:
        def changed(*given: Any) -> None:
            grad = local(dict(model.named_parameters())[name].grad)
            with torch.no_grad():
                grad.copy_(change(grad.clone()))

        if ranks is None or rank in ranks:
            optimizer.register_step_pre_hook(changed)
        yield

    return inject


def rule(op: str, **wrong: Any) -> Callable[[], AbstractContextManager[Any]]:
    """The sharding rule of an operator says something else, from the table of decisions on."""

    @contextmanager
    def patched() -> Iterator[None]:
        packet = getattr(torch.ops.aten, op)
        before = rule_of(getattr(packet, packet.overloads()[0]))
        assert before is not None
        try:
            with mock.patch.dict(RULES, {f"aten::{op}": lambda call: replace(before(call), **wrong)}):
                forget()
                yield
        finally:
            forget()

    return patched


def suspected(model: Any, optimizer: Any, rank: int) -> Any:
    """Nothing more than the plan is wrong."""
    return ExitStack()


def bit_flip(x: torch.Tensor) -> torch.Tensor:
    x.view(-1).view(torch.int32)[x.numel() // 3] ^= 1 << 27
    return x


def negative(x: torch.Tensor) -> torch.Tensor:
    return -x


def zero(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x)


def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def in_bfloat16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().to(x.dtype)


def rolled(x: torch.Tensor) -> torch.Tensor:
    return x.roll(1, 0)


def last_row_lost(x: torch.Tensor) -> torch.Tensor:
    x[-1] = 0
    return x


def rows_swapped(x: torch.Tensor) -> torch.Tensor:
    x[[0, 1]] = x[[1, 0]]
    return x


def slightly(x: torch.Tensor) -> torch.Tensor:
    return x * (1 + 2e-5)


def skipped(step: Any, x: torch.Tensor, *given: Any) -> torch.Tensor:
    """A reduction that is not done."""
    return x.clone()


def doubled(step: Any, x: torch.Tensor, *given: Any) -> torch.Tensor:
    return 2 * step(x, *given)


def summed_in_bfloat16(step: Any, x: torch.Tensor, *given: Any) -> torch.Tensor:
    return step(x.bfloat16(), *given).to(x.dtype)


def averaged(step: Any, x: torch.Tensor, reduce_op: str, *given: Any) -> torch.Tensor:
    return step(x, "avg", *given)


def as_sum(step: Any, x: torch.Tensor, reduce_op: str, *given: Any) -> torch.Tensor:
    return step(x, "sum", *given)


def in_wrong_order(step: Any, x: torch.Tensor, dim: int, *given: Any) -> torch.Tensor:
    made = step(x, dim, *given)
    return made.roll(made.shape[dim] // 2, dim)


def own_term_lost(step: Any, x: torch.Tensor, *given: Any) -> torch.Tensor:
    return step(torch.zeros_like(x), *given)


def wrong_shard(step: Any, x: torch.Tensor, dim: int, *given: Any) -> torch.Tensor:
    return step(x.roll(x.shape[dim] // 2, dim), dim, *given)


FORWARD, BACKWARD = False, True
FAULTS: tuple[Fault, ...] = (
    # Wrong from the beginning: parameters and buffers.
    Fault(
        "a bit of a sharded weight",
        "sp",
        weight("layers.0.attention.wq.weight", bit_flip, (1,)),
        "layers.0.attention.wq.weight",
        "parameter",
        (1,),
    ),
    Fault(
        "a bit of a replicated weight",
        "sp",
        weight("layers.1.ffn_norm.weight", bit_flip, (1,)),
        "layers.1.ffn_norm.weight",
        "parameter",
        (1,),
    ),
    Fault(
        "a bit of a fully sharded weight",
        "fsdp",
        weight("layers.1.feed_forward.w1.weight", bit_flip, (0,)),
        "layers.1.feed_forward.w1.weight",
        "parameter",
        (0,),
    ),
    Fault(
        "a bit on one of the replicas of HSDP",
        "hsdp",
        weight("layers.0.feed_forward.w2.weight", bit_flip, (3,)),
        "layers.0.feed_forward.w2.weight",
        "parameter",
        (3,),
    ),
    Fault(
        "a shard that was not loaded",
        "tp",
        weight("layers.0.feed_forward.w1.weight", zero, (1,)),
        "layers.0.feed_forward.w1.weight",
        "parameter",
        (1,),
    ),
    Fault(
        "a shard read at the wrong offset",
        "sp",
        weight("layers.1.attention.wo.weight", rolled, (0,)),
        "layers.1.attention.wo.weight",
        "parameter",
        (0,),
    ),
    Fault(
        "two rows of the embedding swapped",
        "fsdp",
        weight("tok_embeddings.weight", rows_swapped, (1,)),
        "tok_embeddings.weight",
        "parameter",
        (1,),
    ),
    Fault(
        "a weight that went through bfloat16",
        "2d",
        weight("layers.0.attention.wv.weight", in_bfloat16),
        "layers.0.attention.wv.weight",
        "parameter",
    ),
    Fault(
        "a bias with the wrong sign",
        "tp",
        weight("layers.1.feed_forward.w2.bias", negative),
        "layers.1.feed_forward.w2.bias",
        "parameter",
    ),
    # Operators of the forward.
    Fault(
        "a product with a flipped sign on one rank",
        "sp",
        operator("mm", 1, negative, (1,)),
        "layers.0.attention.wk",
        "mm",
        (1,),
    ),
    Fault(
        "a product with a lost row", "tp", operator("mm", 6, last_row_lost, (0,)), "layers.1.attention.wv", "mm", (0,)
    ),
    Fault("a product that is slightly wrong", "sp", operator("mm", 0, slightly), "layers.0.attention.wq", "mm"),
    Fault("a product in bfloat16", "fsdp", operator("mm", 2, in_bfloat16, (1,)), "layers.0.attention.wv", "mm", (1,)),
    Fault("a bias added twice", "tp", operator("addmm", 2, twice), "layers.1.feed_forward.w1", "addmm"),
    Fault(
        "an activation of the wrong kind",
        "sp",
        attribute("layers.1.feed_forward.gelu", "approximate", "tanh"),
        "layers.1.feed_forward.gelu",
        "gelu",
    ),
    Fault(
        "a norm with the wrong epsilon",
        "sp",
        attribute("layers.1.attention_norm", "eps", 1e-3),
        "layers.1.attention_norm",
        "native_layer_norm",
    ),
    Fault(
        "a norm with the wrong epsilon on one rank",
        "fsdp",
        attribute("layers.0.ffn_norm", "eps", 1e-3, (1,)),
        "layers.0.ffn_norm",
        "native_layer_norm",
        (1,),
    ),
    Fault(
        "attention with a wrong sign on one rank",
        "2d",
        operator("_scaled_dot_product_flash_attention_for_cpu", 1, negative, (2,)),
        "layers.1.attention",
        "_scaled_dot_product",
        (2,),
    ),
    Fault(
        "attention that does not look back",
        "tp",
        attribute("layers.0.attention", "use_attn_mask", False),
        "layers.0.attention",
        "_scaled_dot_product",
    ),
    Fault("a residual that is dropped", "fsdp", operator("add", 1, zero), "layers.0", "add"),
    Fault(
        "an embedding of the wrong tokens",
        "fsdp",
        operator("embedding", 0, rolled, (0,)),
        "tok_embeddings",
        "embedding",
        (0,),
    ),
    Fault("a log-softmax in bfloat16", "sp", operator("_log_softmax", 0, in_bfloat16), "", "_log_softmax"),
    Fault(
        "a loss that is seven times as large on one rank",
        "hsdp",
        operator("nll_loss_forward", 0, lambda x: 7 * x, (1,)),
        "",
        "nll_loss_forward",
    ),
    # Operators of the backward.
    Fault(
        "a gradient of an activation with a flipped sign on one rank",
        "sp",
        operator("gelu_backward", 0, negative, (1,), True),
        "layers.1.feed_forward.gelu",
        "gelu_backward",
        (1,),
        "backward",
    ),
    Fault(
        "a gradient of a weight with a flipped sign on one rank",
        "tp",
        operator("mm", 3, negative, (0,), True),
        "layers.1.feed_forward.w2",
        "mm",
        (0,),
        "backward",
    ),
    Fault(
        "a partial gradient with a flipped sign on one rank",
        "tp",
        operator("mm", 4, negative, (1,), True),
        "layers.1.feed_forward.w1",
        "mm",
        (1,),
        "backward",
    ),
    Fault(
        "a partial sum of a norm's gradient lost",
        "sp",
        operator("native_layer_norm_backward", 0, zero, (1,), True, 1),
        "norm",
        "native_layer_norm_backward",
        (1,),
        "backward",
    ),
    Fault(
        "a gradient in bfloat16",
        "fsdp",
        operator("gelu_backward", 1, in_bfloat16, None, True),
        "layers.0.feed_forward.gelu",
        "gelu_backward",
        None,
        "backward",
    ),
    Fault(
        "a gradient of the embedding twice as large",
        "fsdp",
        operator("embedding_dense_backward", 0, twice, None, True),
        "pos_embeddings",
        "embedding_dense_backward",
        None,
        "backward",
    ),
    Fault(
        "an attention gradient that is zero on one rank",
        "2d",
        operator("_scaled_dot_product_flash_attention_for_cpu_backward", 0, zero, (3,), True),
        "layers.1.attention",
        "_scaled_dot_product",
        (3,),
        "backward",
    ),
    Fault(
        "a sum of gradients in bfloat16",
        "tp",
        operator("sum", 0, in_bfloat16, None, True),
        "layers.1.feed_forward.w2",
        "sum",
        None,
        "backward",
    ),
    # Redistributions.
    Fault(
        "an all-reduce that is not done",
        "tp",
        collective("all_reduce", 2, skipped),
        "layers.0.attention.wo",
        "redistribute P->R",
    ),
    Fault(
        "an all-reduce that averages",
        "tp",
        collective("all_reduce", 3, averaged),
        "layers.0.feed_forward.w2",
        "redistribute P->R",
    ),
    Fault(
        "an all-reduce in bfloat16",
        "tp",
        collective("all_reduce", 2, summed_in_bfloat16),
        "layers.0.attention.wo",
        "redistribute P->R",
    ),
    Fault(
        "an all-gather in the wrong order",
        "sp",
        collective("all_gather", 0, in_wrong_order),
        "layers.0.attention",
        "redistribute S(1)->R",
    ),
    Fault(
        "a reduce-scatter that lost a term",
        "sp",
        collective("reduce_scatter", 2, own_term_lost, (1,)),
        "layers.0.attention.wo",
        "redistribute P->S(1)",
        (1,),
    ),
    Fault(
        "a reduce-scatter that is doubled",
        "sp",
        collective("reduce_scatter", 3, doubled),
        "layers.0.feed_forward.w2",
        "redistribute P->S(1)",
    ),
    Fault(
        "a weight gathered in the wrong order",
        "fsdp",
        collective("all_gather", 4, in_wrong_order),
        "layers.0.attention.wq",
        "redistribute S(0)->R",
    ),
    Fault(
        "a weight gathered without one shard",
        "fsdp",
        collective("all_gather", 6, own_term_lost, (0,)),
        "layers.0.attention.wv",
        "redistribute S(0)->R",
    ),
    Fault(
        "a gradient that is summed, not averaged",
        "fsdp",
        collective("reduce_scatter", 2, as_sum, None, True),
        "",
        "redistribute P(avg)->S(0)",
        None,
        "backward",
    ),
    Fault(
        "a gradient reduction that lost a rank",
        "fsdp",
        collective("reduce_scatter", 5, own_term_lost, (1,), True),
        "",
        "redistribute P(avg)->S(0)",
        (1,),
        "backward",
    ),
    Fault(
        "an all-reduce over replicas that is not done",
        "hsdp",
        collective("all_reduce", 4, skipped, None, True),
        "",
        "redistribute",
        None,
        "backward",
    ),
    Fault(
        "an all-reduce of gradients in bfloat16",
        "hsdp",
        collective("all_reduce", 2, summed_in_bfloat16, None, True),
        "",
        "redistribute",
        None,
        "backward",
    ),
    Fault(
        "a gradient of a norm that is not summed",
        "sp",
        collective("all_reduce", 0, skipped, None, True),
        "norm",
        "redistribute P->R",
        None,
        "backward",
    ),
    Fault(
        "a shard of the wrong rank",
        "tp",
        collective("shard", 0, wrong_shard, None, True),
        "",
        "redistribute",
        None,
        "backward",
    ),
    # The optimizer.
    Fault(
        "a gradient that was changed before the step",
        "sp",
        gradient("layers.0.attention.wk.weight", twice),
        "layers.0.attention.wk.weight",
        "lerp",
        None,
        "optimizer",
        steps=2,
    ),
    Fault(
        "a gradient that was changed on one rank",
        "fsdp",
        gradient("layers.1.feed_forward.w1.weight", negative, (1,)),
        "layers.1.feed_forward.w1.weight",
        "lerp",
        (1,),
        "optimizer",
    ),
    Fault(
        "a gradient that lost its last row on one replica",
        "hsdp",
        gradient("layers.0.attention.wo.weight", last_row_lost, (2,)),
        "layers.0.attention.wo.weight",
        "lerp",
        (2,),
        "optimizer",
    ),
    Fault("another learning rate on one rank", "fsdp", option("lr", 2e-3, (1,)), "", "", (1,), "optimizer"),
    Fault("another weight decay", "tp", option("weight_decay", 0.5), "", "mul", None, "optimizer"),
    Fault("another beta on one rank", "sp", option("betas", (0.9, 0.9), (0,)), "", "", (0,), "optimizer"),
    Fault("another epsilon", "2d", option("eps", 1e-5), "", "", None, "optimizer"),
    # Sharding rules.
    Fault(
        "a rule that adds a replicated tensor on each rank",
        "qwen3",
        suspected,
        "model.layers.0.self_attn",
        "add",
        process=rule("add", linear=(frozenset({0}), frozenset({1}))),
    ),
    Fault(
        "a rule that averages over what is contracted",
        "tp",
        suspected,
        "layers.0.attention.wo",
        "mm",
        process=rule("mm", reduce={"k": "avg"}),
    ),
    Fault(
        "a rule that averages gradients of a norm",
        "sp",
        suspected,
        "norm",
        "native_layer_norm_backward",
        None,
        "backward",
        process=rule("native_layer_norm_backward", reduce={"...1": "avg", "...2": "avg"}),
    ),
    Fault(
        "a rule that runs a masked lookup without the mask",
        "tp",
        suspected,
        "tok_embeddings",
        "embedding",
        process=rule("embedding", local=lambda call: call.run(indices=call["indices"] % call["weight"].shape[0])),
    ),
    # A model of the zoo, in a global view; and a mesh whose axes are taken for each other.
    Fault(
        "a stale buffer on one rank",
        "qwen3",
        weight("model.rotary_emb.inv_freq", twice, (1,)),
        "model.rotary_emb.inv_freq",
        "parameter",
        (1,),
    ),
    Fault(
        "a head's norm with the wrong epsilon",
        "qwen3",
        attribute("model.layers.1.self_attn.k_norm", "variance_epsilon", 1e-2),
        "model.layers.1.self_attn.k_norm",
        "add",
    ),
    Fault(
        "a gate with a flipped sign on one rank",
        "qwen3",
        operator("silu", 1, negative, (1,)),
        "model.layers.1.mlp.act_fn",
        "silu",
        (1,),
    ),
    Fault(
        "a gradient of a gate that is zero on one rank",
        "qwen3",
        operator("silu_backward", 0, zero, (0,), True),
        "model.layers.1.mlp.act_fn",
        "silu_backward",
        (0,),
        "backward",
    ),
    Fault("the axes of a 2-D mesh swapped", "2d, swapped", suspected, "tok_embeddings", "from_local"),
)
