"""The cases by name: each module has `run(effort)`, which yields records.

The first line of the module's docstring, after its name, describes what is measured; the command line shows it.
`BY_DEFAULT` are the cases that `python -m bench` runs. The others take long, as they run over the whole operator
database and over all layouts.
"""

from types import ModuleType

from . import (
    attention,
    call,
    compile,
    doors,
    eager,
    experts,
    gpu,
    memory,
    operators,
    predict,
    record,
    redistribute,
    remedies,
    save,
    scale,
    search,
    start,
    step,
    watch,
    whole,
    wire,
)


class Case:
    """A case: `run` of its module, and a description of what it measures."""

    def __init__(self, module: ModuleType):
        self.run = module.run
        self.words = (module.__doc__ or "").split("\n")[0].partition(": ")[2]


ORDER = (
    wire,
    step,
    whole,
    doors,
    call,
    eager,
    compile,
    start,
    search,
    attention,
    experts,
    predict,
    remedies,
    memory,
    scale,
    save,
    watch,
    record,
    gpu,
    operators,
    redistribute,
)
CASES = {m.__name__.rpartition(".")[2]: Case(m) for m in ORDER}
"""Name -> case, in the order in which they run."""

BY_DEFAULT = tuple([name for name in CASES if name not in ("operators", "redistribute")])

__all__ = ["BY_DEFAULT", "CASES", "Case"]
