"""`dtensor::first_gradient`: where the backward of a whole step begins.

The gradient of a loss is 1. Told so, Inductor fuses what the backward of the loss computes with its forward, and
chooses loops for both that suit neither: on a CPU 5.5 ms for a cross entropy of 1,024 x 1,024 logits, of which the two
kernels take 3.0. An operator that it cannot look into keeps them apart, as two graphs do.
"""

import torch
from torch.library import register_fake

from dtensor.mesh.operator_library import library

library.define("first_gradient(Tensor loss) -> Tensor")
library.impl("first_gradient", torch.ones_like, "CompositeExplicitAutograd")
register_fake("dtensor::first_gradient", torch.ones_like, lib=library)

FIRST_GRADIENT = torch.ops.dtensor.first_gradient.default

__all__ = ["FIRST_GRADIENT"]
