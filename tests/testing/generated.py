"""Reads code that Inductor generated, to test overlap: the order of starts, waits and matrix products."""

import re

from dtensor.errors import ArgumentError

_CALL = re.compile(
    r"(?:(?P<result>\w+) = )?torch\.ops\._c10d_functional\.(?P<op>\w+)\.default\((?P<first>\w+)"
    r"|extern_kernels\.(?P<product>mm|addmm|bmm|baddbmm)\("
)
_WAIT = "wait_tensor"


def _calls(code: str) -> list[re.Match[str]]:
    body = code.split("def call(")[1].splitlines()
    return [m for m in (_CALL.search(line.split("#")[0]) for line in body) if m]


def starts_and_waits(code: str) -> str:
    """Return one letter for each relevant call in the code of one graph, in order.

    S starts a collective, W waits for one, and m is a matrix product.
    """
    return "".join(["m" if c["product"] else "W" if c["op"] == _WAIT else "S" for c in _calls(code)])


def products_while_under_way(code: str) -> list[int]:
    """Return, for each collective, the number of matrix products between its start and its wait.

    The collectives are in the order in which they start.

    Raises:
        ValueError: a collective is never waited for.
    """
    found: dict[str, int] = {}
    products, started = 0, dict[str, int]()
    for call in _calls(code):
        if call["product"]:
            products += 1
        elif call["op"] != _WAIT:
            started[call["result"] or call["first"]] = products  # an in-place one has no result
        elif call["first"] in started:
            found[call["first"]] = products - started[call["first"]]
    if missing := [name for name in started if name not in found]:
        raise ArgumentError(f"started and never waited for: {', '.join(missing)}")
    return [found[name] for name in started]


__all__ = ["products_while_under_way", "starts_and_waits"]
