"""DTensors in `torch.distributed.checkpoint.state_dict`: whole and sharded state dicts, as torch makes of its own."""

from ..mesh.tensor_spec import chunk
from ..tensor.factories import distribute_tensor
from ..tensor.tensor import DTensor
from ..torch_private.state_dicts import recognise

recognise(DTensor, distribute_tensor, lambda x: chunk(x._spec))
