"""python -m tests.zoo docs/zoo.md: runs every model in every way, and writes what was seen.

python -m tests.zoo docs/zoo.md [models, by parts of their names]    rows of others stay as they are
"""

import sys
from collections import Counter
from pathlib import Path

from tqdm import tqdm

from dtensor.testing import kept_ranks, run_ranks

from .compare import breaks_of_plain, tried
from .ways import WAYS, cases

SHOWN = ("eager", "compiled", "inductor")
"""What the page has of how a model runs; the tests have more."""

HEAD = """# The zoo

Models as they are, small, over two ranks and over two by two: loss, output, every gradient and the losses of five steps
of AdamW against one device. Plans: [tests/zoo/models.py](../tests/zoo/models.py). `python -m tests.zoo docs/zoo.md`
writes this page.

| way | what |
|---|---|
| tp, fsdp, 2d | `distribute_model`, `fully_shard`, both |
| fast | over links so fast that models as small as these share nearly all of their work |
| styles | `parallelize_module` |
| torch tp, torch fsdp2, torch ddp | models that torch has sharded, compiled by `backend="dtensor"` |
| converted | the same models, ours by `dtensor.interop.convert_module` |

"compiled" is with the passes and without code of Inductor, which compiles a third. Graphs, graph breaks and collectives
(after the passes, forward and backward) are those of a compiled step. A break is counted for each frame that it runs
through, after a slash those of the model by itself; that the causes are the model's own, but for torch's FSDP2 and
DDP, the tests see to. "gathered" names operators without a rule.

| model | way | eager | compiled | Inductor | graphs | breaks | collectives | gathered |
|---|---|---|---|---|---|---|---|---|
"""


def _told(counts: Counter[str]) -> str:
    return ", ".join(f"{n} {op}" for op, n in sorted(counts.items()))


def _row(name: str, way: str, todo: list[str], breaks: int) -> str:
    found = {how: run_ranks(tried, WAYS[way][0], name, way, how, timeout=900)[0] for how in todo}
    right = [("right" if not isinstance(found[how], str) else found[how]) if how in todo else "" for how in SHOWN]
    seen, compiled = ["", "", "", ""], found["compiled"]
    if not isinstance(compiled, str):
        found = f"{compiled.breaks.total()} / {breaks}" if breaks else str(compiled.breaks.total())
        seen = [str(compiled.graphs), found, _told(compiled.collectives), _told(compiled.fallbacks)]
    return f"| {' | '.join([name, way, *map(str, right), *seen])} |\n"


def _kept(page: Path) -> dict[tuple[str, str], str]:
    """The rows of a page, by model and way."""
    lines = page.read_text().splitlines(keepends=True) if page.exists() else []
    rows = [(line.split("|"), line) for line in lines if line.count("|") == 10]
    return {(cells[1].strip(), cells[2].strip()): line for cells, line in rows}


if __name__ == "__main__":
    page, wanted = Path(sys.argv[1]), sys.argv[2:]
    by_row: dict[tuple[str, str], list[str]] = {}
    for name, way, how in [case for case in cases() if case[2] in SHOWN]:
        by_row.setdefault((name, way), []).append(how)
    kept = _kept(page) if wanted else {}
    todo = [row for row in by_row if not wanted or any(part in row[0] for part in wanted)]
    with kept_ranks():
        breaks = {name: breaks_of_plain(name).total() for name in dict.fromkeys(name for name, _ in todo)}
        for row in tqdm(todo):
            kept[row] = _row(*row, by_row[row], breaks[row[0]])
    page.write_text(HEAD + "".join(kept[row] for row in by_row if row in kept))
