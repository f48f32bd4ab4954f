"""What people write who come from torch's DTensor, FSDP2 or JAX: a table of mistakes, each with what its error says.

A table has the code of a mistake and below it, behind `!`, the class of the error and the words that its message has:
what was given | why that cannot be | what to write instead. `torch:` stands before the class where one device raises
the same. Code that calls `run(f, ...)` is tried eagerly and compiled.

On every rank the same error has to come, in one sentence, without the traceback of another one before it, and nobody
may wait.
"""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from dtensor.testing import run_ranks

from .attempts import Attempts

TABLES = sorted(Path(__file__).parent.glob("*.txt"))
LONGEST = 900
"""Characters that a message may have, without the lines of the user."""

TIMEOUT = 240.0
ADDRESS = re.compile(r"0x[0-9a-f]{6,}")


class Mistake(NamedTuple):
    code: str
    kind: str
    of_torch: bool
    words: tuple[str, ...]


def mistakes(table: Path) -> list[Mistake]:
    found = []
    for block in table.read_text().strip().split("\n\n"):
        *code, expected = block.splitlines()
        assert expected.startswith("! "), block
        kind, *words = expected.removeprefix("! ").split(" | ")
        found.append(Mistake("\n".join(code), kind.removeprefix("torch: "), kind.startswith("torch:"), tuple(words)))
    return found


def tried(rank, folder, codes):
    """What each of the codes raises, eager and compiled."""
    attempts = Attempts(rank, folder)
    return [
        (code, compiled, *attempts.attempt(code, compiled))
        for code in codes
        for compiled in ((False, True) if "run(" in code else (False,))
    ]


def wrong(mistake: Mistake, compiled: bool, kinds: list[str], text: str, shown: str) -> str:
    """What is wrong with the error that a mistake raised; "" if nothing is."""
    if not kinds:
        return "nothing was raised"
    said = text.partition("\n\nfrom user code:")[0]
    if mistake.of_torch:
        lacks = [word for word in mistake.words if word not in text]
        kind = mistake.kind in kinds or compiled  # Dynamo has classes of its own
        return f"lacks {lacks}" if lacks else "" if kind else f"is not a {mistake.kind}"
    lacks = [word for word in mistake.words if word not in said]
    reasons = {
        f"lacks {lacks}": lacks,
        f"is not a {mistake.kind}": kinds[0] != mistake.kind,
        "is no ShardingError": "ShardingError" not in kinds,
        "names too little: what was given, why, and what to write": len(mistake.words) < 3,
        "is of several lines": "\n" in said,
        "is too long": len(said) > LONGEST,
        "has an address": ADDRESS.search(said),
        "comes after another traceback": shown.count("Traceback (most recent call last)") > 1,
    }
    return "; ".join(reason for reason, holds in reasons.items() if holds)


def check(tables, folder):
    table = [mistake for path in tables for mistake in mistakes(path)]
    by_code = {mistake.code: mistake for mistake in table}
    assert len(by_code) == len(table), "a mistake stands in the tables twice"
    ranks = run_ranks(tried, 2, str(folder), list(by_code), timeout=TIMEOUT)
    failures = []
    for on_first, on_second in zip(*ranks, strict=True):
        code, compiled, kinds, text, _ = on_first
        reason = wrong(by_code[code], *on_first[1:])
        if not reason and (kinds, ADDRESS.sub("", text)) != (on_second[2], ADDRESS.sub("", on_second[3])):
            reason = f"is another one on rank 1: {on_second[2][:1]} {on_second[3]}"
        if reason:
            failures.append(f"{code}{'  (compiled)' if compiled else ''}\n{kinds[:1]} {text}\n-> {reason}\n")
    print(f"{len(table)} mistakes, tried {len(ranks[0])} times, {len(failures)} failures")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("table", TABLES, ids=lambda path: path.stem)
def test_each_message_says_what_was_given_why_and_what_to_write(table, tmp_path):
    check([table], tmp_path)


def test_there_are_many():
    table = [mistake for path in TABLES for mistake in mistakes(path)]
    assert len([mistake for mistake in table if not mistake.of_torch]) >= 100
