"""The sides without code generation: the graphs from which Inductor would generate code run operator by operator.

This is for counting. All of Inductor's graph passes have run, so the collectives are final, and most of the remaining
time of a compile would be spent in the C++ compiler.
"""

from typing import Any

import torch
from torch._dynamo.utils import detect_fake_mode
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.virtualized import V

from dtensor.torch_private.compiling import boxed

from .record import OURS
from .sides import HALVES, SWITCHES, Wrap


def inductor_passes(**options: Any) -> Wrap:
    """Return a wrapper like `torch.compile(fn, options=options)` with Inductor, but without code generation."""

    def inner(gm: torch.fx.GraphModule, example_inputs: Any, **kwargs: Any) -> Any:
        fake = detect_fake_mode(example_inputs)
        with V.set_fake_mode(fake), config.patch(options):
            post_grad_passes(gm, bool(kwargs.get("is_inference", False)))
        gm.recompile()
        return boxed(gm.forward)

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        return compile_fx(gm, example_inputs, inner_compile=inner, config_patches=options)

    return lambda fn: torch.compile(fn, backend=backend)


ALONE = {"inner": "aot_eager", "agreement": False}
"""Options of this library's backend when there are no other ranks with which to compare graphs."""

UNCODED: dict[str, Wrap | None] = {
    OURS: lambda fn: torch.compile(fn, backend="dtensor", fullgraph=True, options=ALONE),
    HALVES: lambda fn: torch.compile(fn, backend="dtensor", fullgraph=True, options={**ALONE, "split_batch": 2}),
    "by hand": lambda fn: fn,
    "torch eager": None,
    "torch compiled": inductor_passes(),
    "torch tuned": inductor_passes(**SWITCHES),
}
"""Side -> the wrapper to use instead of Inductor; None for a side that is not compiled."""

__all__ = ["ALONE", "UNCODED", "inductor_passes"]
