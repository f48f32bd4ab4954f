"""What the rules offer, as text: of every call that the tests of the families make, each candidate, and what else is
said of the call.

The other tests find what is offered and wrong. What is right and offered no more would only be slower, so it is listed
here: `EXPECTTEST_ACCEPT=1 pytest tests/rules/test_candidates.py` rewrites `candidates.txt`; read the diff.
"""

import difflib
import importlib
import inspect
import os
from pathlib import Path

import torch

from dtensor.rules.rule import candidates
from dtensor.testing.rules.candidates import OneAxis, call_and_rule, layout_of, tensors

HERE = Path(__file__).parent
FILE = HERE / "candidates.txt"
OTHERS = ("across", "written", "unread", "home", "refuses_empty", "shape_arg")
"""Attributes of a rule that its candidates do not tell."""


def every_call():
    """Every case of this folder, with the name of what makes it."""
    for path in sorted(HERE.glob("test_*.py")):
        module = importlib.import_module(f"tests.rules.{path.stem}")
        for name, make in sorted(vars(module).items()):
            own = inspect.isgeneratorfunction(make) and make.__module__ == module.__name__
            if own and name.endswith("_cases") and not inspect.signature(make).parameters:
                torch.manual_seed(0)
                yield from ((f"{path.stem.removeprefix('test_')}.{name}", case) for case in make())


def said(value):
    """An argument as text: of a tensor its shape, and its dtype if that is none of the usual ones."""
    match value:
        case torch.Tensor():
            dtype = {torch.float64: "", torch.int64: "int", torch.bool: "bool"}.get(value.dtype)
            return f"{str(value.dtype).removeprefix('torch.') if dtype is None else dtype}{list(value.shape)}"
        case list() | tuple():
            return f"({' '.join(map(said, value))})"
        case frozenset() | set():
            return f"{{{' '.join(sorted(map(said, value)))}}}"
        case dict():
            return f"{{{' '.join([f'{k}:{said(v)}' for k, v in sorted(value.items())])}}}"
        case float():
            return f"{value:g}"
    return str(value).removeprefix("torch.")


def offered(case):
    """The call, and below it a line for each candidate and one for what else the rule says."""
    call, rule = call_and_rule(case, OneAxis(2))
    given = [*map(said, case.args), *[f"{name}={said(x)}" for name, x in sorted(case.kwargs.items())]]
    lines = [f"{case.func} {' '.join(given)}"]
    ndims = [[x.dim() for x in tensors((case.args, case.kwargs))], [o.ndim if o else 0 for o in call.outputs]]
    for found in candidates(rule):
        sides = [
            [layout_of(state, ndim).text for state, ndim in zip(states, ndim_of)]
            for states, ndim_of in zip((found.inputs, found.outputs), ndims)
        ]
        lines.append(f"    {' '.join(sides[0])} -> {' '.join(sides[1])}")
    others = [
        f"{name}={said(x)}" for name in OTHERS if (x := getattr(rule, name)) is not None and x != {} and x != set()
    ]
    local = [] if rule.local is None else [f"local={rule.local.__name__}"]
    return "\n".join([*lines, *([f"    {' '.join([*local, *others])}"] if local or others else [])])


def test_what_rules_offer():
    blocks: dict[str, list[str]] = {}
    for maker, case in every_call():
        block = offered(case)
        if block not in blocks.setdefault(maker, []):
            blocks[maker].append(block)
    text = "".join([f"# {maker}\n\n" + "\n".join(found) + "\n\n" for maker, found in blocks.items()])
    assert len(blocks) > 30
    if os.environ.get("EXPECTTEST_ACCEPT"):
        FILE.write_text(text)
    old, new = FILE.read_text().splitlines(), text.splitlines()
    assert old == new, "\n".join(difflib.unified_diff(old, new, "candidates.txt", "as it is", lineterm="", n=2))
