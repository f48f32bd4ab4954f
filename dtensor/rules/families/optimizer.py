"""Fused optimizer steps: pointwise in the parameter, its gradient and its state.

The operators take lists, but these rules see one index at a time, as for foreach operators. The parameter and its state
keep their layouts; the gradient is redistributed to the parameter's.
"""

from typing import Any

from ..call import Call, rule_for
from ..rule import Rule
from .pointwise import broadcast

FUSED: dict[str, Any] = {
    "_fused_adam": ("exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"),
    "_fused_adamw": ("exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"),
    "_fused_sgd": ("momentum_buffer_list",),
    "_fused_adagrad": ("state_sums",),
}
"""Operator -> the arguments that hold the parameter's state, to which it writes."""


@rule_for(*FUSED)
def fused_step(call: Call) -> Rule:
    (parameter,) = call["self"]
    shapes = [o.shape for o in call.operands]
    ins, sizes = broadcast(shapes, parameter.shape)
    names = [a.name for a in call.func._schema.arguments]
    state = call.operands_at(names.index(n) for n in FUSED[call.name] if call[n])
    own, *_ = ins
    return Rule(ins, (own,), sizes, written=state or frozenset())


__all__ = ["FUSED"]
