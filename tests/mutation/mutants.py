"""Mutants: what is changed in a file, one place at a time, by the operators of cosmic-ray.

Of its operators those are taken whose result somebody could have written by mistake: `+` for `-`, `<` for `<=`, a
number off by one, a condition turned round, a loop that does not run, a decorator left out; and one of ours, `in` for
`not in`. Left out are `==` for `is`, which is a matter of interning, `<=` for `==` where a string is compared with a
literal, and what hardly ever fits the types, such as `<<` for `|`, which would only make the figures look better.

Not mutated are annotations and aliases of types, decorators that only save time, and `zip(strict=…)`, an assertion.
"""

import ast
import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import parso
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators import (
    binary_operator_replacement,
    boolean_replacer,
    break_continue,
    comparison_operator_replacement,
    exception_replacer,
    number_replacer,
    operator,
    remove_decorator,
    unary_operator_replacement,
    zero_iteration_for_loop,
)

BINARY = {
    "Add": ("Sub",),
    "Sub": ("Add",),
    "Mul": ("Div", "Add"),
    "Div": ("Mul",),
    "FloorDiv": ("Div", "Mul", "Mod"),
    "Mod": ("FloorDiv",),
    "Pow": ("Mul",),
    "LShift": ("RShift",),
    "RShift": ("LShift",),
    "BitOr": ("BitAnd",),
    "BitAnd": ("BitOr",),
    "BitXor": ("BitOr",),
}
"""Operator between two values -> what stands in its place, by cosmic-ray's names."""

COMPARISONS = {
    "Eq": ("NotEq", "LtE", "GtE"),
    "NotEq": ("Eq", "Lt", "Gt"),
    "Lt": ("LtE", "GtE"),
    "LtE": ("Lt", "Gt"),
    "Gt": ("GtE", "LtE"),
    "GtE": ("Gt", "Lt"),
    "Is": ("IsNot",),
    "IsNot": ("Is",),
}
"""Comparison -> what stands in its place."""

ORDERING = {f"ReplaceComparisonOperator_{a}_{b}" for a in ("Eq", "NotEq") for b in COMPARISONS[a] if b[0] in "LG"}
"""What compares by order in place of equality: nobody does that to names."""

ONLY_TIME = ("lru_cache", "cache", "functools")
"""How decorators begin that keep what was computed."""


class SwapMembership(operator.Operator):
    """`in` for `not in`, and the reverse."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
        if node.type == "comparison" and self._words(node.children[1]) in ("in", "not in"):
            yield node.children[1].start_pos, node.children[1].end_pos

    def mutate(self, node: Any, index: int) -> Any:
        swapped = {"in": " not in", "not in": " in"}[self._words(node.children[1])]
        node.children[1] = parso.parse(swapped)
        return node

    @classmethod
    def examples(cls) -> tuple[operator.Example, ...]:
        return operator.Example("x in y", "x not in y"), operator.Example("x not in y", "x in y")

    @staticmethod
    def _words(node: Any) -> str:
        return " ".join(node.get_code().split())


def _replacing(module: ModuleType, kind: str, table: dict[str, tuple[str, ...]]) -> list[type[operator.Operator]]:
    return [getattr(module, f"{kind}_{a}_{b}") for a, others in table.items() for b in others]


OPERATORS: tuple[type[operator.Operator], ...] = (
    *_replacing(binary_operator_replacement, "ReplaceBinaryOperator", BINARY),
    *_replacing(comparison_operator_replacement, "ReplaceComparisonOperator", COMPARISONS),
    unary_operator_replacement.ReplaceUnaryOperator_Delete_Not,
    unary_operator_replacement.ReplaceUnaryOperator_Delete_USub,
    boolean_replacer.AddNot,
    boolean_replacer.ReplaceTrueWithFalse,
    boolean_replacer.ReplaceFalseWithTrue,
    boolean_replacer.ReplaceAndWithOr,
    boolean_replacer.ReplaceOrWithAnd,
    break_continue.ReplaceBreakWithContinue,
    break_continue.ReplaceContinueWithBreak,
    exception_replacer.ExceptionReplacer,
    number_replacer.NumberReplacer,
    remove_decorator.RemoveDecorator,
    zero_iteration_for_loop.ZeroIterationForLoop,
    SwapMembership,
)

Position = tuple[int, int]


@dataclass(frozen=True)
class Mutant:
    """A file with one change.

    Attributes:
        file: relative to the root of the repository.
        operator: the name of the class that made the change.
        lines: those of the file, from 1, of which the change is a part.
        before, after: these lines, and what they have become.
        source: the whole file as changed.
    """

    file: str
    operator: str
    lines: tuple[int, ...]
    before: str
    after: str
    source: str

    def __str__(self) -> str:
        return f"{self.file}:{self.lines[0]} {self.operator}\n  - {self.before}\n  + {self.after}"


def _position(node: Any, end: bool = False) -> Position:
    return (node.end_lineno, node.end_col_offset) if end else (node.lineno, node.col_offset)


def _is_type(node: ast.AST) -> bool:
    """Whether an expression is made of names, `|` and subscripts, as an alias of a type is."""
    match node:
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _is_type(left) and _is_type(right)
        case ast.Subscript(value=value):
            return _is_type(value)
        case ast.Name() | ast.Attribute():
            return True
    return isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, str))


def _excluded(tree: ast.Module) -> Iterator[tuple[Position, Position]]:
    """Where no mutation is worth a try."""
    for node in ast.walk(tree):
        match node:
            case ast.arg(annotation=ast.AST() as found) | ast.FunctionDef(returns=ast.AST() as found):
                yield _position(found), _position(found, end=True)
            case ast.AnnAssign(annotation=found):
                yield _position(found), _position(found, end=True)
            case ast.Call(func=ast.Name(id="zip"), keywords=keywords):
                for keyword in keywords:
                    yield _position(keyword), _position(keyword, end=True)
        for decorator in getattr(node, "decorator_list", []):
            if ast.unparse(decorator).startswith(ONLY_TIME):
                # The position of a decorator in parso's tree begins at its "@".
                yield (decorator.lineno, 0), (decorator.lineno + 1, 0)
    for node in tree.body:
        if isinstance(node, ast.Assign) and (isinstance(node.value, ast.BinOp) and _is_type(node.value)):
            yield _position(node), _position(node, end=True)


def _changed(before: str, after: str) -> tuple[tuple[int, ...], str, str]:
    """The lines of `before` that differ, and both texts of them without indentation."""
    old, new = before.split("\n"), after.split("\n")
    first = next(i for i, (a, b) in enumerate(zip(old, new)) if a != b)
    last = 0
    while last < min(len(old), len(new)) - first - 1 and old[-1 - last] == new[-1 - last]:
        last += 1
    lines = tuple(range(first + 1, len(old) - last + 1))
    texts = [" ".join([line.strip() for line in text[first : len(text) - last]]).strip() for text in (old, new)]
    return lines, texts[0], texts[1]


@dataclass(frozen=True)
class Place:
    """Where an operator would change a file: its `occurrence`-th place there."""

    file: str
    kind: type[operator.Operator]
    occurrence: int


def _positions(made: operator.Operator, node: Any) -> list[tuple[Position, Position]]:
    return list(made.mutation_positions(node) or ())


def _says_no_more(kind: type[operator.Operator], node: Any) -> bool:
    """Whether to negate this condition is what another operator does: one comparison, or what is negated already."""
    if kind is not boolean_replacer.AddNot:
        return False
    condition = node.children[2 if node.type == "test" else 1]
    return condition.type == "not_test" or (condition.type == "comparison" and len(condition.children) == 3)


def _orders_names(kind: type[operator.Operator], node: Any) -> bool:
    """Whether this would compare a literal string by order, as in `name <= "sum"`."""
    return kind.__name__ in ORDERING and any(child.type == "string" for child in node.children)


def places(file: str, source: str) -> list[Place]:
    """All places of a file, in an order that follows from the text alone."""
    excluded = list(_excluded(ast.parse(source)))
    nodes = list(ast_nodes(get_ast(source)))
    found = []
    for kind in OPERATORS:
        made = kind()
        at = [(node, start, end) for node in nodes for start, end in _positions(made, node)]
        for occurrence, (node, start, end) in enumerate(at):
            within = any(first <= start and end <= last for first, last in excluded)
            if not within and not _says_no_more(kind, node) and not _orders_names(kind, node):
                found.append(Place(file, kind, occurrence))
    return found


def mutant(place: Place, source: str) -> Mutant | None:
    """The file changed at `place`; None if that is no program, or the same one."""
    text = mutate_code(source, place.kind(), place.occurrence)
    if text is None or text == source:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            compile(text, place.file, "exec")
            same = ast.dump(ast.parse(text)) == ast.dump(ast.parse(source))
    except (SyntaxError, ValueError):
        return None
    return None if same else Mutant(place.file, place.kind.__name__, *_changed(source, text), text)


def sampled(root: Path, found: list[Place], count: int, seed: int, skip: int = 0) -> list[Mutant]:
    """So many mutants in an order that the seed decides, after the first `skip` places in that order."""
    shuffled = list(found)
    random.Random(seed).shuffle(shuffled)
    sources = {file: (root / file).read_text() for file in sorted({place.file for place in found})}
    made: list[Mutant] = []
    for place in shuffled[skip:]:
        if len(made) == count:
            break
        changed = mutant(place, sources[place.file])
        if changed is not None:
            made.append(changed)
    return made
