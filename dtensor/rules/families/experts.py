"""Layers of experts: tokens and experts may be sharded, over axes of their own or the same one after the other.

    tokens sharded      each rank computes its own; gradients of experts are sums over the ranks
    experts sharded     each rank computes what its experts make of all tokens, and results are sums over the ranks

So where tokens are sharded over the axis that deals out experts, they are gathered for the experts and their results
reduce-scattered: over n ranks that sends n/k of what an exchange of each token with the ranks of its k experts would,
with sizes that do not depend on the routing.
"""

from typing import Any

from ..bind import rule_for, rule_table
from ..call import Call, LocalCall
from ..expert_layers import experts, experts_backward
from ..notation import LibraryRule, Rule, library_rule
from .row_lookup import first_row


def _named(call: LocalCall, *names: str) -> list[Any]:
    """Arguments of the call; the indices count from this rank's first expert."""
    found = {name: call[name] for name in names}
    if axes := call.axes.get("e"):
        first = first_row(call.call["up"].shape[0], axes, call.mesh, found["index"].device)
        found["index"] = found["index"] - first
    return [*found.values()]


LAYER = ("x", "index", "weight", "up", "down", "up_bias", "down_bias")


def _forward(call: LocalCall) -> Any:
    return experts(*_named(call, *LAYER, "gate"), of=call.call["up"].shape[0])


def _backward(call: LocalCall) -> Any:
    return experts_backward(*_named(call, "grad", *LAYER, "hidden", "gate"), of=call.call["up"].shape[0])


FORWARD = LibraryRule("t1,t1,t1,e11,e11,e1,e1->t1,t11", reduce="e", own_outputs=(1,), local=_forward)

rule_table(__name__, {"dtensor::experts": FORWARD})


@rule_for("dtensor::experts_backward")
def experts_gradients(call: Call) -> Rule:
    """Gradients of experts are sums over shards of the tokens, those of tokens over shards of the experts. Of what is
    between both products a rank reads the rows of its own experts."""
    biases = ",".join(["1" if call[name] is None else "e1" for name in ("up_bias", "down_bias")])
    text = f"t1,t1,t1,t1,e11,e11,e1,e1,t11->t1,t1,e11,e11,{biases}"
    return library_rule(text, reduce="te", own_inputs="hidden", local=_backward)


__all__ = ["FORWARD", "experts_gradients"]
