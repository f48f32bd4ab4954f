"""Who is to blame where a compiled run differs from an eager one: a pass and a step of it, torch, or nobody.

A graph is bisected on simulated ranks (`graphs`), made small (`shrink`) and left as a folder that runs alone
(`folder`). A run is bisected by running the program again with less compiled (`runs`).
"""

from .blame import Blame
from .graphs import Finding, examine
from .runs import Comparison, Run, RunFailed, bisect
from .watching import watch

__all__ = ["Blame", "Comparison", "Finding", "Run", "RunFailed", "bisect", "examine", "watch"]
