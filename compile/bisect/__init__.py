"""Who is to blame where a compiled run differs from an eager one: a pass and a step of it, torch, or nobody.

A graph is bisected on simulated ranks (`graphs`), made small (`shrink`) and left as a folder that runs alone
(`folder`). A run is bisected by running the program again with less compiled (`runs`).
"""

from .blame import Blame
from .graphs import GraphFinding, examine
from .runs import BisectRun, Comparison, RunFailed, bisect
from .watching import watch

__all__ = ["BisectRun", "Blame", "Comparison", "GraphFinding", "RunFailed", "bisect", "examine", "watch"]
