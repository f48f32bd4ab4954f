"""What to write so that a rank waits less for a collective, and what that saves; or why there is nothing to write.

Each rule reads the manifest and a collective in it. What an option of the backend would do was priced by running the
passes with it (`dtensor.compile.backends.alternatives`); what a change of the program would do is priced from the
collective's own estimate: a fixed time, and a time for each byte. All savings are estimates, in seconds, and hold for
each remedy alone.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from dtensor.layout.cost import Link, seconds

LEAST = 0.05
"""The least part of its exposed time that a remedy has to save to be named."""

WIDE = ("float32", "float64")
"""Dtypes that can be sent in half of their bytes or less."""

LOSS = frozenset(("_log_softmax", "_softmax", "logsumexp", "amax", "exp", "nll_loss_forward", "cross_entropy_loss"))
"""Operators by which a loss over classes begins."""

ROUNDS_OF_LOSS = 3
"""The all-reduces of a loss on sharded logits: the maximum, the sum, and the logit of the target."""

OPTIONS = {
    "split_batch": (
        "options={{'split_batch': 2}}",
        "half of the batch computes while the collective of the other half is under way",
    ),
    "memory_budget": (
        "options={{'memory_budget': {gathered}}}",
        "what the forward gathered is saved, not gathered again: a rank holds {more:,} bytes more at its peak. "
        "fully_shard(..., reshard_after_forward=False) does so, too",
    ),
    "passes": ("the options without 'disable' and 'passes'", "passes that are switched off merge or move it"),
}
"""Option -> what to write, and what that does. `gathered` is the number of bytes that the forward gathers."""


@dataclass(frozen=True)
class Remedy:
    """What to write.

    Attributes:
        write: the code; "" if there is nothing to write.
        why: what it does, or why there is nothing.
        saves: estimated seconds that it saves of the collective's exposed time.
        step: estimated seconds that it saves of the whole step, where that was priced; else as `saves`.
    """

    write: str
    why: str
    saves: float = 0.0
    step: float = 0.0


Rule = Callable[[dict[str, Any], dict[str, Any]], Iterator[Remedy]]


def remedies(manifest: dict[str, Any], c: dict[str, Any]) -> list[Remedy]:
    """Return what would shorten the exposed time of a collective of a manifest, the most effective first: at least one,
    which may be that there is nothing to write. An empty list if nothing of it is exposed."""
    if not c["exposed"]:
        return []
    found = [r for rule in RULES for r in rule(manifest, c) if r.saves >= LEAST * c["exposed"]]
    return sorted(found, key=lambda r: -r.saves) or [Remedy("", _reason(c))]


def with_remedies(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the collectives of a manifest, each with its remedies as dicts under `remedies`."""
    return [c | {"remedies": [asdict(r) for r in remedies(manifest, c)]} for c in manifest["collectives"]]


def _options(manifest: dict[str, Any], c: dict[str, Any]) -> Iterator[Remedy]:
    graphs = manifest["graphs"]
    for a in manifest.get("alternatives", ()):
        if a["failed"] or not set(graphs) <= set(a["seconds"]):
            continue
        step = sum([g["seconds"] - a["seconds"][d] for d, g in graphs.items()])
        more = max([0, *[a["peak"][d] - g["peak_bytes"] for d, g in graphs.items()]])
        write, why = (text.format(gathered=_gathered(manifest), more=more) for text in OPTIONS[a["option"]])
        every = sum([max(0.0, _less(a, other)) for other in manifest["collectives"]])
        if step > 0 and every > 0:
            yield Remedy(write, why, _less(a, c) * min(1.0, step / every), step)


def _less(a: dict[str, Any], c: dict[str, Any]) -> float:
    """Seconds by which a collective is exposed less in an alternative."""
    left = a["exposed"].get(c["direction"], {})
    return c["exposed"] - sum([left.get(str(n), 0.0) for n in c["asked"]])


def _gathered(manifest: dict[str, Any]) -> int:
    """Bytes of what the forward gathers: as many as a budget has to have so that all of it is saved."""
    gathers = [c for c in manifest["collectives"] if c["op"] == "all_gather" and c["direction"] == "forward"]
    return sum([c["sent"] * len(c["ranks"]) for c in gathers])


def _half_the_bytes(manifest: dict[str, Any], c: dict[str, Any]) -> Iterator[Remedy]:
    saves = min(c["exposed"], (c["seconds"] - c["fixed"]) / 2)
    if c["dtype"] not in WIDE or not saves:
        return
    if c["parameter"] and c["op"] == "all_gather":
        write = "fully_shard(..., mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))"
        why = "parameters are sent in half of the bytes; the forward computes in bfloat16"
    elif _is_gradient(c):
        write = "fully_shard(..., mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))"
        why = "gradients are sent in half of the bytes, and added up in bfloat16"
    elif "redistribute(" in c["code"]:
        write, why = "redistribute(..., forward_dtype=torch.bfloat16)", "half of the bytes; rounds what is sent"
        if c["direction"] == "backward":
            write = write.replace("forward_dtype", "backward_dtype")
    else:
        write = "with torch.autocast(device_type, dtype=torch.bfloat16):"
        why = "activations are computed and sent in half of the bytes"
    yield Remedy(write, why, saves, saves)


def _later(manifest: dict[str, Any], c: dict[str, Any]) -> Iterator[Remedy]:
    if _is_gradient(c):
        write = "model.set_requires_gradient_sync(False) in all microbatches but the last (fully_shard)"
        why = "gradients are reduced once for all microbatches; until then a rank holds whole ones"
        yield Remedy(write, why, c["exposed"], c["exposed"])


def _sharded_loss(manifest: dict[str, Any], c: dict[str, Any]) -> Iterator[Remedy]:
    shape = c["shapes"][0] if c["shapes"] else []
    last = f"S({len(shape) - 1})->R"
    if c["op"] != "all_gather" or c["move"] != last or not LOSS & set(c["readers"]):
        return
    n = len(c["ranks"])
    rows = prod(shape) * n // _classes(c)
    small = ROUNDS_OF_LOSS * seconds("all_reduce", 4 * rows, n, Link(**c["link"]))
    write = "ColwiseParallel(output_layouts=Shard(-1), use_local_output=False), and the loss in `with loss_parallel():`"
    yield Remedy(write, "the loss is computed on sharded logits", c["exposed"] - small, c["exposed"] - small)


def _classes(c: dict[str, Any]) -> int:
    """The number of classes: the longest side of what is gathered, as it is sent with another dim first."""
    return max(*c["shapes"][0]) * len(c["ranks"])


def _is_gradient(c: dict[str, Any]) -> bool:
    """Whether it reduces gradients that the backward returns."""
    reduces = c["op"] in ("all_reduce", "reduce_scatter") and c["move"].startswith("P")
    return reduces and c["direction"] == "backward" and c["readers"] == ["output"]


RULES: Sequence[Rule] = (_options, _half_the_bytes, _later, _sharded_loss)
"""The rules; each yields what it knows to save."""


def _reason(c: dict[str, Any]) -> str:
    if c["fixed"] > c["seconds"] / 2:
        return "most of its time is the start of a collective, whatever is sent; only fewer collectives would save it"
    reader = next(iter(c["readers"]), "")
    what = "the caller" if reader == "output" else reader if reader else "what follows"
    return f"{what} needs it at once, and nothing else is left to compute; another plan may send less: dtensor.search"


__all__ = ["Remedy", "remedies", "with_remedies"]
