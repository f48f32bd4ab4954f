"""torch.compile for DTensor: the `dtensor` backend, the passes inside plain Inductor, and reports on compiled programs.

Dynamo -> AOTAutograd -> forward and backward graphs -> `dtensor.passes` -> Inductor, or eager execution of the graph
"""

if not __name__.startswith("dtensor."):
    raise ImportError(f"the folder compile/ was imported as {__name__!r}; write: import dtensor.compile")

from .backends.backend import backend
from .backends.options import Options
from .packages.keeping import Kept
from .packages.loading import Package
from .packages.package import load, package, packaging
from .packages.sharing import Shared, shared
from .recording.statistics import GraphRecord, Statistics, statistics
from .recording.watch_compiles import dump
from .reports.measuring import measure
from .reports.report import Report, report
from .reports.step_log import StepLog
from .whole_step.step import CompiledStep, step

__all__ = [
    "CompiledStep",
    "GraphRecord",
    "Kept",
    "Options",
    "Package",
    "Report",
    "Shared",
    "Statistics",
    "StepLog",
    "backend",
    "dump",
    "load",
    "measure",
    "package",
    "packaging",
    "report",
    "shared",
    "statistics",
    "step",
]
