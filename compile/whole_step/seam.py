"""`dtensor::first_gradient`: where the backward of a whole step begins.

The gradient of a loss is 1. Told so, Inductor fuses what the backward of the loss computes with its forward, and
chooses loops for both that suit neither: on a CPU 5.5 ms for a cross entropy of 1,024 x 1,024 logits, of which the two
kernels take 3.0. An operator that it cannot look into keeps them apart, as two graphs do.
"""

import torch

from dtensor.mesh.operator_library import define

define("first_gradient(Tensor loss) -> Tensor", torch.ones_like, torch.ones_like)

FIRST_GRADIENT = torch.ops.dtensor.first_gradient.default

__all__ = ["FIRST_GRADIENT"]
