"""Private torch APIs for copying state dicts to the host. Apart from `core`, because they import all of torch's DCP."""

from torch.distributed.checkpoint._state_dict_stager import StateDictStager

__all__ = ["StateDictStager"]
