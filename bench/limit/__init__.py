"""The limit: the same training written by hand, on local tensors with functional collectives.

    functions   sharded linear layers and embeddings, with the collectives of their backwards
    stages      the models as lists of stages, made of these layers
    sharded     stages with parameters sharded over a data axis, gathered in advance and reduced in the background

It sends the fewest bytes that a plan needs, in the fewest collectives, and overlaps each collective with computation
that does not depend on it. It is the code that one would write knowing the model and the plan, without DTensors.
"""

from .sharded import Sharded
from .stages import Tensor, staged

__all__ = ["Sharded", "Tensor", "staged"]
