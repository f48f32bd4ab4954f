"""Inductor's passes without its code: a backend that runs the graph Inductor would make code of, operator by operator.

For counting: what is sent is decided by then, and a C++ compiler takes most of the time of the rest.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.utils import detect_fake_mode
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.virtualized import V

from dtensor._torch import boxed


def inductor_passes(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
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


__all__ = ["inductor_passes"]
