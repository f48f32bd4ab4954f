"""`PerRank`: the values that a call gave, one of each rank."""

import base64
from typing import Any

from ...tensor.visualize import ranks_text
from .cells import Shown


class PerRank(list[Any]):
    """One value of each rank, in the order of ranks. It is shown with equal values once:

    ranks 0-2: torch.Size([3, 4])
    rank 3: torch.Size([1, 4])
    """

    def __repr__(self) -> str:
        texts: dict[str, list[int]] = {}
        for rank, value in enumerate(self):
            texts.setdefault(repr(value), []).append(rank)
        return "\n".join([f"{ranks_text(ranks)}:{_beside(text)}" for text, ranks in texts.items()])

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """For notebooks: the text, and the picture that all ranks show."""
        shown = {"text/plain": repr(self)}
        if self and all(isinstance(value, Shown) and value.text == self[0].text for value in self):
            for kind, content in self[0].pictures.items():
                shown[kind] = base64.b64encode(content).decode() if isinstance(content, bytes) else content
        return shown


def _beside(text: str) -> str:
    return f"\n{text}" if "\n" in text else f" {text}"


__all__ = ["PerRank"]
