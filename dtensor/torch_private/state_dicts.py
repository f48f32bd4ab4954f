"""Private names by which torch.distributed.checkpoint.state_dict recognises tensors that are distributed.

Its functions (`get_state_dict`, `set_model_state_dict`, ...) gather, spread and copy what is an instance of torch's
DTensor, and take every other tensor for a whole one. They look that class up among the globals of one module when they
run, so it does not matter whether a program imported them before. That module, which imports all of torch's DTensor, is
changed once a program imports it.
"""

from collections.abc import Callable
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from .on_demand import when_imported

Chunk = Callable[[Any], tuple[Any, Any]]


def recognise(ours: type, distribute: Callable[..., Any], chunk: Chunk) -> None:
    """Let torch's functions on state dicts handle tensors of the class `ours` as they handle torch's DTensors.

    Args:
        ours: a class with `from_local`, `to_local`, `redistribute`, `device_mesh`, `placements` and `_local_tensor`.
        distribute: called as `distribute_tensor` is, for placements that are not torch's.
        chunk: called with a tensor of the class; returns sizes and offsets of this rank's shard.
    """
    when_imported("torch.distributed._state_dict_utils", lambda: _extend(ours, distribute, chunk))


def _extend(ours: type, distribute: Callable[..., Any], chunk: Chunk) -> None:
    from torch.distributed import _state_dict_utils as utils
    from torch.distributed.tensor import Placement

    theirs, distribute_theirs = utils.DTensor, utils.distribute_tensor
    broadcast = utils._distribute_tensors

    class Either(type):
        def __instancecheck__(cls, x: Any) -> bool:
            return isinstance(x, (theirs, ours))

        def __getattr__(cls, name: str) -> Any:
            return getattr(theirs, name)

    def distribute_tensor(x: Any, mesh: DeviceMesh, placements: Any) -> Any:
        known = all(isinstance(p, Placement) for p in placements)
        return (distribute_theirs if known else distribute)(x, mesh, placements)

    def _distribute_tensors(state: dict[str, Any], keys: list[str], device: Any, pg: Any = None) -> None:
        # Which part of a whole tensor belongs to this rank is asked in terms of torch's placements alone.
        own = [key for key in keys if isinstance(state.get(key), tuple) and isinstance(state[key][0], ours)]
        for key in own:
            x, whole = state[key]
            for dim, (size, offset) in enumerate(zip(*chunk(x))):
                whole = whole.narrow(dim, offset, size)
            if x.is_meta:
                sizes = {"shape": x.shape, "stride": x.stride()}
                x = type(x).from_local(whole.detach().clone(), x.device_mesh, x.placements, **sizes)
            else:
                x.to_local().copy_(whole)
            state[key] = x
        broadcast(state, [key for key in keys if key not in own], device, pg)

    utils.DTensor = Either("DTensor", (), {})  # pyright: ignore
    utils.distribute_tensor, utils._distribute_tensors = distribute_tensor, _distribute_tensors  # pyright: ignore


__all__ = ["recognise"]
