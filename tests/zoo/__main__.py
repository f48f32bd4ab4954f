"""python -m tests.zoo docs/zoo.md: runs every model in every way, and writes what was seen."""

import sys
from collections import Counter
from pathlib import Path

from tqdm import tqdm

from dtensor.testing import kept_ranks, run_ranks

from .compare import WAYS, tried
from .models import EXAMPLES, NOT_COMPILED

HEAD = """# The zoo

Models as they are, small, over two ranks by `distribute_model` (tp) or `fully_shard` (fsdp), and over two by two by
both (2d), eager and compiled with the passes: loss, output, every gradient and the losses of five steps of AdamW
against one device. Plans: [tests/zoo/models.py](../tests/zoo/models.py). `python -m tests.zoo docs/zoo.md` writes this
page. Graphs, graph breaks and collectives (after the passes, forward and backward) are those of a compiled step;
"gathered" names operators without a rule.

| model | way | eager | compiled | graphs | breaks | collectives | gathered |
|---|---|---|---|---|---|---|---|
"""


def _told(counts: Counter[str]) -> str:
    return ", ".join(f"{n} {op}" for op, n in sorted(counts.items()))


def _row(name: str, way: str) -> str:
    compiled = NOT_COMPILED.get(name)
    if compiled is None:
        compiled = run_ranks(tried, WAYS[way][0], name, way, True, timeout=900)[0]
    eager = run_ranks(tried, WAYS[way][0], name, way, False, timeout=900)[0]
    right = ["right" if not isinstance(found, str) else found for found in (eager, compiled)]
    seen = ["", "", "", ""]
    if not isinstance(compiled, str):
        seen = [str(compiled.graphs), str(compiled.breaks), _told(compiled.collectives), _told(compiled.fallbacks)]
    return f"| {' | '.join([name, way, *right, *seen])} |\n"


if __name__ == "__main__":
    with kept_ranks():
        rows = [_row(name, way) for name in tqdm(EXAMPLES) for way in WAYS]
    Path(sys.argv[1]).write_text(HEAD + "".join(rows))
