"""The cases, by name: each module has `run(effort)`, which gives records one by one.

The module's first line says in words what is measured. `BY_DEFAULT` are those that `python -m bench` runs;
the others take long, and are of the whole operator database and of all layouts.
"""

from types import ModuleType

from . import call, compile, eager, gpu, memory, operators, redistribute, save, scale, step, wire


class Case:
    """A case: its module's `run`, and in words what it measures."""

    def __init__(self, module: ModuleType):
        self.run = module.run
        self.words = (module.__doc__ or "").split("\n")[0].partition(": ")[2]


ORDER = (wire, step, call, eager, compile, memory, scale, save, gpu, operators, redistribute)
CASES = {m.__name__.rpartition(".")[2]: Case(m) for m in ORDER}
"""Name -> case, in the order in which they run."""

BY_DEFAULT = tuple([name for name in CASES if name not in ("operators", "redistribute")])

__all__ = ["BY_DEFAULT", "CASES", "Case"]
