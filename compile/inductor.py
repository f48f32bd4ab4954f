"""The passes inside Inductor: after its joint-graph passes and the partition, before its post-grad passes."""

from functools import cache
from pathlib import Path
from typing import Any

from torch import fx

import dtensor
from dtensor._torch import CustomGraphPass, get_hash_for_files

from .options import Options
from .pipeline import optimise


class Passes(CustomGraphPass):
    """The pass pipeline with given options, as a pass of Inductor's."""

    def __init__(self, options: Options):
        self.options = options

    def __call__(self, graph: fx.Graph) -> None:
        gm = graph.owning_module
        assert gm is not None, "Inductor hands over graphs of a module"
        optimise(gm, self.options)

    def uuid(self) -> Any:
        return source_hash(), repr(self.options)


def run_plain(graph: fx.Graph) -> None:
    """The pipeline with default options on a graph of plain `torch.compile`."""
    Passes(Options())(graph)


@cache
def source_hash() -> bytes:
    """Hash of the library's source: compiled code that Inductor keeps is stale when the passes change."""
    root = Path(dtensor.__file__).parent
    files = [p for part in ("", "compile", "passes", "rules") for p in sorted((root / part).glob("*.py"))]
    return get_hash_for_files(tuple(map(str, files)))


__all__ = ["Passes", "run_plain", "source_hash"]
