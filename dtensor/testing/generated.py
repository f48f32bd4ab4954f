"""Reading code that Inductor generates: in which order collectives start and are waited for, and products are taken."""

import re

_CALL = re.compile(
    r"(?:(?P<result>\w+) = )?torch\.ops\._c10d_functional\.(?P<op>\w+)\.default\((?P<first>\w+)"
    r"|extern_kernels\.(?P<product>mm|addmm|bmm|baddbmm)\("
)
_WAIT = "wait_tensor"


def _calls(code: str) -> list[re.Match[str]]:
    body = code.split("def call(")[1].splitlines()
    return [m for m in (_CALL.search(line.split("#")[0]) for line in body) if m]


def starts_and_waits(code: str) -> str:
    """What the code of one graph does, in order, in a letter each: S starts a collective, W waits, m is a product."""
    return "".join(["m" if c["product"] else "W" if c["op"] == _WAIT else "S" for c in _calls(code)])


def products_while_under_way(code: str) -> list[int]:
    """For each collective, in the order in which they start, the number of products before it is waited for.

    Raises:
        ValueError: one is never waited for.
    """
    found: dict[str, int] = {}
    products, started = 0, dict[str, int]()
    for call in _calls(code):
        if call["product"]:
            products += 1
        elif call["op"] != _WAIT:
            started[call["result"] or call["first"]] = products  # one in place gives nothing
        elif call["first"] in started:
            found[call["first"]] = products - started[call["first"]]
    if missing := [name for name in started if name not in found]:
        raise ValueError(f"started and never waited for: {', '.join(missing)}")
    return [found[name] for name in started]


__all__ = ["products_while_under_way", "starts_and_waits"]
