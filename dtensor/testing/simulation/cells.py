"""Runs a cell of a notebook on a rank, and shows the value of its last expression.

The cell runs in `__main__` of the rank, so that what it defines is there in the next cell. `Shown` is the value as text
and as a picture: values themselves, such as DTensors, stay on the ranks.
"""

import ast
import sys
from dataclasses import dataclass
from typing import Any

from .by_value import remember_lines

PICTURES = {"image/png": "_repr_png_", "image/svg+xml": "_repr_svg_"}
"""Type of a picture -> the method by which notebooks ask a value for one."""


@dataclass(frozen=True)
class Shown:
    """A value as a notebook shows it.

    Attributes:
        text: its `repr`.
        pictures: type, such as "image/png" -> content.
    """

    text: str
    pictures: dict[str, Any]

    @classmethod
    def of(cls, value: Any) -> "Shown":
        """Show `value`."""
        pictures = {kind: method() for kind, name in PICTURES.items() if (method := getattr(value, name, None))}
        return cls(repr(value), {kind: content for kind, content in pictures.items() if content is not None})

    def __repr__(self) -> str:
        return self.text


def run_cell(name: str, text: str) -> Shown | None:
    """Run `text`, whose lines are those of the file `name`.

    Returns:
        The value of the last expression, if the cell ends with one that is not None.
    """
    remember_lines(name, text.splitlines(keepends=True))
    main = vars(sys.modules["__main__"])
    tree = ast.parse(text, name)
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr):
        exec(compile(tree, name, "exec"), main)
        return None
    tree.body.pop()
    exec(compile(tree, name, "exec"), main)
    value = eval(compile(ast.Expression(last.value), name, "eval"), main)
    return None if value is None else Shown.of(value)


def variable(name: str) -> Any:
    """The variable of that name.

    Raises:
        NameError: there is none.
    """
    main = vars(sys.modules["__main__"])
    if name not in main:
        raise NameError(f"the ranks have no variable {name!r}; define it in a cell that begins with %%ranks")
    return main[name]


__all__ = ["Shown", "run_cell", "variable"]
