"""`DebugMode`: torch's debug mode, extended to show operators on DTensors."""

from typing import Any

from ..tensor.tensor import DTensor
from ..torch_private.core import DebugOpCall, TorchDebugMode, tensor_debug_string, tree_map


class DebugMode(TorchDebugMode):
    """Context manager that records all operators that run in eager mode; `debug_string()` shows them as a tree.

    It takes the options of torch.utils._debug_mode.DebugMode, from which it is derived and which would show local
    tensors only. Here every operator on DTensors, including `redistribute`, has a line with their global shapes and
    placements. Below it stand the operators it ran: the collectives that redistributed operands, and the operator on
    local tensors.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            self._record_call(DebugOpCall(func, args, kwargs or {}, self.call_depth, stack=self.record_stack_trace))
            return NotImplemented  # DTensor then dispatches, and its local operators come back here
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _record_call(self, call: Any) -> None:
        if not self.store_original_args and isinstance(call, DebugOpCall):
            call.args, call.kwargs = self._shown((call.args, call.kwargs))
        super()._record_call(call)

    def _record_call_output(self, call: Any, output: Any) -> None:
        super()._record_call_output(call, self._shown(output))

    def _shown(self, values: Any) -> Any:
        """Return `values` with every DTensor replaced by a string that describes it."""

        def shown(x: Any) -> Any:
            if not isinstance(x, DTensor):
                return x
            memo = self._tensor_memo if self.record_ids else None
            text = tensor_debug_string(x, self.record_tensor_attributes, memo)
            return f"d{text}| {', '.join(str(p) for p in x.placements)}"

        return tree_map(shown, values)


__all__ = ["DebugMode"]
