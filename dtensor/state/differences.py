"""What names two states do not share, in words."""

import difflib
from collections.abc import Sequence

MOST = 20
"""How many names a message lists of each kind."""


def differences(missing: Sequence[str], extra: Sequence[str]) -> str:
    """Names that are wanted and missing in a file, each with the nearest that is there, and names that are not wanted.

    >>> differences(["up.weight"], ["up.weigth", "b"])
    "it lacks 'up.weight' (has 'up.weigth'), and has in addition 'up.weigth', 'b'"
    """
    lacks = _listed([f"{name!r}{_near(name, extra)}" for name in missing[:MOST]], len(missing))
    return f"it lacks {lacks}, and has in addition {_listed([repr(name) for name in extra[:MOST]], len(extra))}"


def _near(name: str, names: Sequence[str]) -> str:
    found = difflib.get_close_matches(name, names, n=1, cutoff=0.8)
    return f" (has {found[0]!r})" if found else ""


def _listed(names: list[str], count: int) -> str:
    return ", ".join(names) + (f" and {count - len(names)} more" if count > len(names) else "") if names else "nothing"


__all__ = ["differences"]
