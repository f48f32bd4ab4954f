"""The sides without Inductor's code: the graphs that it would make code of, run operator by operator.

For counting: what is sent is decided by then, and a C++ compiler takes most of the time of the rest. All of Inductor's
passes on graphs have run.
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
    """What `torch.compile(fn, options=options)` is to Inductor, up to where code is made."""

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
"""Options of ours where there are no other ranks to agree with."""

UNCODED: dict[str, Wrap | None] = {
    OURS: lambda fn: torch.compile(fn, backend="dtensor", fullgraph=True, options=ALONE),
    HALVES: lambda fn: torch.compile(fn, backend="dtensor", fullgraph=True, options={**ALONE, "split_batch": 2}),
    "by hand": lambda fn: fn,
    "torch eager": None,
    "torch compiled": inductor_passes(),
    "torch tuned": inductor_passes(**SWITCHES),
}
"""Side -> what takes the place of Inductor; None for what is not compiled."""

__all__ = ["ALONE", "UNCODED", "inductor_passes"]
