"""The limit: the same training written by hand, on local tensors with functional collectives.

    functions   linear layers and embeddings that are cut, with the collectives of their backwards
    stages      the models as lists of stages, of those
    sharded     stages whose parameters are cut over a data axis, gathered ahead and reduced behind

What is sent is the least that the plan needs, in as few collectives; what does not depend on a collective is computed
while it travels. All of it is as one would write it who knows the model, the plan and nothing of DTensors.
"""

from .sharded import Sharded
from .stages import Tensor, staged

__all__ = ["Sharded", "Tensor", "staged"]
