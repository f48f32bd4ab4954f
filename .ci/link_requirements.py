"""Links what a package requires from this environment into another one: `link_requirements.py PACKAGE SITE_PACKAGES`.

Of what is installed here only the package's requirements, and theirs, are then there, without extras: what the package
imports and does not require is missing. The package itself is not linked.
"""

import sys
from importlib.metadata import files, requires
from pathlib import Path

from packaging.requirements import Requirement


def required(package: str) -> set[str]:
    """Names of all that `package` requires, directly or not."""
    todo, seen = [(package, "")], set()
    while todo:
        name, extra = wanted = todo.pop()
        if wanted in seen:
            continue
        seen.add(wanted)
        for requirement in map(Requirement, requires(name) or []):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                todo += [(requirement.name, e) for e in ("", *requirement.extras)]
    return {name for name, _ in seen} - {package}


def link(package: str, target: Path) -> None:
    """Link the folders and modules of an installed package into `target`."""
    listed = files(package) or []
    site = Path(str(listed[0].locate())).parents[len(listed[0].parts) - 1]
    for top in sorted({f.parts[0] for f in listed} - {"..", "__pycache__"}):
        if not (target / top).exists():
            (target / top).symlink_to(site / top)


def main(package: str, target: str) -> None:
    """Link all requirements."""
    for name in sorted(required(package)):
        link(name, Path(target))


main(*sys.argv[1:])
