"""A model of the zoo over several ranks, in one of several ways, against itself on one device: loss, output, every
gradient, and steps of AdamW."""

import copy
from collections import Counter
from typing import Any, NamedTuple

import torch

from dtensor import DTensor, distribute_tensor, fallbacks
from dtensor.compile import statistics
from dtensor.compile.recording.frames import recent_frames
from dtensor.torch_private.compiling import dynamo_counters

from .models import EXAMPLES
from .ways import HOW, WAYS

STEPS = 5
SIZES = (3, 5)
"""Numbers of the samples of batches that follow the first, where sizes are dynamic."""


class Found(NamedTuple):
    """What a comparison saw: collectives of the graphs, what else is counted in compiled code alone, and operators of
    graphs whose layouts were decided that were not among those for which they were."""

    collectives: Counter[str]
    graphs: int
    breaks: Counter[str]
    fallbacks: Counter[str]
    missed: int


def made(name: str) -> torch.nn.Module:
    import transformers

    torch.manual_seed(0)
    return EXAMPLES[name].model(transformers)


def results(out: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return out["loss"], out["logits_per_image" if "logits_per_image" in out else "logits"]


def compare(name: str, way: str, how: str) -> Found:
    """Raises AssertionError where something differs; on each rank."""
    plain, given = made(name), EXAMPLES[name].inputs()
    model, ours = WAYS[way][1](copy.deepcopy(plain), name, given)
    run = model if HOW[how] is None else torch.compile(model, backend="dtensor", **HOW[how])
    before, before_breaks = fallbacks(), _breaks()
    with statistics() as seen:
        _compare_once(plain, given, model, ours, run)
    breaks = _breaks() - before_breaks
    trained = [[p for p in m.parameters() if p.requires_grad] for m in (plain, model)]
    dense, sharded = (torch.optim.AdamW(parameters, lr=1e-3) for parameters in trained)
    for step in range(STEPS):
        dense.step(), sharded.step()
        dense.zero_grad(), sharded.zero_grad()
        batch, cut = (given, ours) if how != "dynamic" else _resized(given, ours, SIZES[step % len(SIZES)])
        want, found = results(plain(**batch))[0], results(run(**cut))[0]
        torch.testing.assert_close(found, want, msg=f"loss after {step + 1} steps: {{}}".format)
        want.backward(), found.backward()
    collectives = Counter(c.op for r in seen.records if r.direction != "joint" for c in r.collectives)
    missed = sum([frame.decided.missed for frame in recent_frames() if frame.decided is not None])
    return Found(collectives, seen.graphs, breaks, fallbacks() - before, missed)


def _resized(given: Any, ours: Any, size: int) -> tuple[Any, Any]:
    """A batch of so many samples, whole and cut as another one is."""
    count = next(iter(given.values())).shape[0]

    def resized(x: Any) -> Any:
        has_samples = isinstance(x, torch.Tensor) and x.shape[:1] == (count,)
        return torch.cat([x] * size)[:size] if has_samples else x

    batch = {k: resized(x) for k, x in given.items()}
    cut = {
        k: distribute_tensor(x, ours[k].device_mesh, ours[k].placements) if isinstance(ours[k], DTensor) else x
        for k, x in batch.items()
    }
    return batch, cut


def _compare_once(plain: torch.nn.Module, given: Any, model: torch.nn.Module, ours: Any, run: Any) -> None:
    want, found = results(plain(**given)), results(run(**ours))
    torch.testing.assert_close(found, want)
    want[0].backward()
    found[0].backward()
    expected = dict(plain.named_parameters())
    for name, p in model.named_parameters():
        name = name.removeprefix("module.")
        if expected[name].grad is None:
            assert p.grad is None, name
            continue
        whole = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        # Rounding is that of the largest elements, up to 21, where plain Inductor is 1e-5 off, too.
        near = 1e-5 * max(1.0, float(expected[name].grad.abs().max()))
        torch.testing.assert_close(whole, expected[name].grad, atol=near, rtol=1.3e-6, msg=f"{name}: {{}}".format)
        assert getattr(p.grad, "placements", None) == getattr(p, "placements", None)


def breaks_of_plain(name: str) -> Counter[str]:
    """Graph breaks that the model has without us."""
    torch.compiler.reset()
    before = _breaks()
    results(torch.compile(made(name), backend="eager")(**EXAMPLES[name].inputs()))[0].backward()
    return _breaks() - before


def _breaks() -> Counter[str]:
    """Causes of graph breaks, and how many frames they have broken: those of callers, too."""
    found: Counter[str] = Counter()
    for text, count in dynamo_counters()["graph_break"].items():
        found[text.splitlines()[0]] += count
    return found


def tried(rank: int, name: str, way: str, how: str) -> Found | str:
    """What a comparison saw on a rank, or why it did not get through."""
    torch.compiler.reset()
    try:
        return compare(name, way, how)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"


__all__ = ["Found", "breaks_of_plain", "compare", "made", "results", "tried"]
