"""The library that defines the operators `torch.ops.dtensor.*`."""

import torch

library: torch.library.Library = torch.library.Library("dtensor", "DEF")

__all__ = ["library"]
