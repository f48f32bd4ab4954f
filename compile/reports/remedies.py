"""What to write so that a rank waits less for a collective, and what that saves; or why there is nothing to write.

What an option of the backend would do was priced by running the passes with it
(`dtensor.compile.backends.alternatives`). What a change of the program would do is said by rules, which read a
collective of a manifest, and priced by simulating the graphs with the times that their collectives would take. All
savings are estimates, in seconds, and hold for each remedy alone.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from dtensor.prices.links import Link, seconds

from ..estimates.timeline import replayed

LEAST = 0.05
"""The least part of its exposed time that a remedy has to save to be named."""

WIDE = {"float32": 4, "float64": 8}
"""Dtypes that can be sent in half of their bytes or less -> their bytes."""

PRODUCTS = frozenset(("mm", "addmm", "bmm", "baddbmm", "convolution"))
"""Operators whose results are in the dtype of `torch.autocast`."""

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
        step: estimated seconds that it saves of the whole step, in all collectives that it concerns.
    """

    write: str
    why: str
    saves: float = 0.0
    step: float = 0.0


Rule = Callable[[dict[str, Any]], Iterator[tuple[str, str, float]]]
"""Collective -> what to write, what that does, and the seconds that the collective takes then."""


def with_remedies(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the collectives of a manifest. Each has under `remedies`, as dicts, what would shorten its exposed time,
    the most effective first: at least one, which may be that there is nothing to write. None if nothing is exposed."""
    found: list[list[Remedy]] = [[] for _ in manifest["collectives"]]
    for k, remedy in [*_options(manifest), *_changes(manifest)]:
        if remedy.saves > LEAST * manifest["collectives"][k]["exposed"]:
            found[k].append(remedy)
    told = [
        (sorted(mine, key=lambda r: -r.saves) or [Remedy("", _reason(c))]) if c["exposed"] else []
        for c, mine in zip(manifest["collectives"], found, strict=True)
    ]
    return [c | {"remedies": list(map(asdict, mine))} for c, mine in zip(manifest["collectives"], told, strict=True)]


def _options(manifest: dict[str, Any]) -> Iterator[tuple[int, Remedy]]:
    """What was priced by running the passes: the number of a collective, and what saves some of it."""
    graphs = manifest["graphs"]
    for a in manifest.get("alternatives", ()):
        if a["failed"] or not set(graphs) <= set(a["seconds"]):
            continue
        step = sum([g["seconds"] - a["seconds"][d] for d, g in graphs.items()])
        more = max([0, *[a["peak"][d] - g["peak_bytes"] for d, g in graphs.items()]])
        write, why = (text.format(gathered=_gathered(manifest), more=more) for text in OPTIONS[a["option"]])
        less = [max(0.0, _less(a, c)) for c in manifest["collectives"]]
        if step > 0 and any(less):
            scale = min(1.0, step / sum(less))
            yield from ((k, Remedy(write, why, scale * x, step)) for k, x in enumerate(less))


def _less(a: dict[str, Any], c: dict[str, Any]) -> float:
    """Seconds by which a collective is exposed less in an alternative."""
    left = a["exposed"].get(c["direction"], {})
    return c["exposed"] - sum([left.get(str(n), 0.0) for n in c["asked"]])


def _changes(manifest: dict[str, Any]) -> Iterator[tuple[int, Remedy]]:
    """What the rules say, priced by simulating the graphs again, with all collectives changed that a change concerns:
    where they queue, one that gets shorter may save what another one is exposed."""
    sent = manifest["collectives"]
    changed: dict[str, tuple[str, dict[int, float]]] = {}
    for k, c in enumerate(sent):
        for rule in RULES:
            for write, why, took in rule(c):
                if took < c["seconds"]:
                    changed.setdefault(write, (why, {}))[1][k] = took
    for write, (why, new) in changed.items():
        step, saved = 0.0, dict[int, float]()
        for direction, g in manifest["graphs"].items():
            mine = [k for k, c in enumerate(sent) if c["direction"] == direction]
            if not any(k in new for k in mine):
                continue
            took = [new[k] if k in new else float(sent[k]["seconds"]) for k in mine]
            seconds_, exposed = replayed(g["order"], g["gaps"], g["taken"], g["computing"], took)
            step += g["seconds"] - seconds_
            saved |= {k: sent[k]["exposed"] - e for k, e in zip(mine, exposed, strict=True)}
        if step > 0:
            yield from ((k, Remedy(write, why, min(saved[k], step), step)) for k in new)


def _gathered(manifest: dict[str, Any]) -> int:
    """Bytes of what the forward gathers: as many as a budget has to have so that all of it is saved."""
    gathers = [c for c in manifest["collectives"] if c["op"] == "all_gather" and c["direction"] == "forward"]
    return sum([c["sent"] * len(c["ranks"]) for c in gathers])


def _half_the_bytes(c: dict[str, Any]) -> Iterator[tuple[str, str, float]]:
    if c["dtype"] not in WIDE:
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
    elif c["direction"] == "backward" or not PRODUCTS.issuperset(c["makers"]):
        return  # of what comes before a product autocast makes a copy, and gradients are added up as before
    else:
        write = "with torch.autocast(device_type, dtype=torch.bfloat16):"
        why = "activations are computed and sent in half of the bytes"
    yield write, why, c["fixed"] + (c["seconds"] - c["fixed"]) / 2


def _a_quarter_of_the_bytes(c: dict[str, Any]) -> Iterator[tuple[str, str, float]]:
    if c["dtype"] not in WIDE:
        return
    if c["parameter"] and c["op"] == "all_gather":
        which, why = "gather_dtype", "weights are sent in float8, in which they are rounded"
    elif _is_gradient(c) and c["op"] == "reduce_scatter":
        which, why = "reduce_dtype", "gradients are sent in float8, and added up in float32"
    else:
        return
    write = f"fully_shard(..., mp_policy=MixedPrecisionPolicy({which}=torch.float8_e4m3fn))"
    yield write, why, c["fixed"] + (c["seconds"] - c["fixed"]) / WIDE[c["dtype"]]


def _later(c: dict[str, Any]) -> Iterator[tuple[str, str, float]]:
    """The last microbatch reduces what was accumulated outside of the graph, where nothing is bucketed."""
    if _is_gradient(c):
        write = "model.set_requires_gradient_sync(False) in all microbatches but the last (fully_shard)"
        why = "gradients are reduced once for all microbatches, each by itself; until then a rank holds whole ones"
        yield write, why, c["fixed"] * (len(c["asked"]) - 1)


def _sharded_loss(c: dict[str, Any]) -> Iterator[tuple[str, str, float]]:
    shape = c["shapes"][0] if c["shapes"] else []
    last = f"S({len(shape) - 1})->R"
    if c["op"] != "all_gather" or c["move"] != last or not LOSS & set(c["readers"]):
        return
    n = len(c["ranks"])
    rows = prod(shape) * n // _classes(c)
    small = ROUNDS_OF_LOSS * seconds("all_reduce", 4 * rows, n, Link(**c["link"]))
    write = "ColwiseParallel(output_layouts=Shard(-1), use_local_output=False), and the loss in `with loss_parallel():`"
    yield write, "the loss is computed on sharded logits", small


def _classes(c: dict[str, Any]) -> int:
    """The number of classes: the longest side of what is gathered, as it is sent with another dim first."""
    return max(*c["shapes"][0]) * len(c["ranks"])


def _is_gradient(c: dict[str, Any]) -> bool:
    """Whether it reduces gradients that the backward returns."""
    reduces = c["op"] in ("all_reduce", "reduce_scatter") and c["move"].startswith("P")
    return reduces and c["direction"] == "backward" and c["readers"] == ["output"]


RULES: Sequence[Rule] = (_half_the_bytes, _a_quarter_of_the_bytes, _later, _sharded_loss)
"""The rules on changes of the program."""


def _reason(c: dict[str, Any]) -> str:
    if c["fixed"] > c["seconds"] / 2:
        return "most of its time is the start of a collective, whatever is sent; only fewer collectives would save it"
    reader = next(iter(c["readers"]), "")
    what = "the caller" if reader == "output" else reader if reader else "what follows"
    return f"{what} needs it at once, and nothing else is left to compute; another plan may send less: dtensor.search"


__all__ = ["Remedy", "with_remedies"]
