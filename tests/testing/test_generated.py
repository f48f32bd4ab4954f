"""Reading what Inductor generates: starts, waits and products."""

import pytest

from tests.testing.generated import products_while_under_way, starts_and_waits

C10D = "torch.ops._c10d_functional"
LINES = [
    f"buf0 = {C10D}.all_gather_into_tensor.default(x, 2, '0')  # {C10D}.wait_tensor.default(buf9)",
    f"buf1 = {C10D}.reduce_scatter_tensor.default(buf0, 'sum', 2, '0')",
    "extern_kernels.mm(a, b, out=buf2)",
    f"{C10D}.wait_tensor.default(buf1)",
    "extern_kernels.addmm(a, b, c, out=buf3)",
    f"{C10D}.wait_tensor.default(buf0)",
]


def code(lines):
    return "\n".join([f"{C10D}.wait_tensor.default(before)", "def call(args):", *[f"    {line}" for line in lines]])


def test_order_and_products():
    assert starts_and_waits(code(LINES)) == "SSmWmW"
    assert products_while_under_way(code(LINES)) == [2, 1]


def test_what_is_never_waited_for():
    with pytest.raises(ValueError, match="never waited for: buf0"):
        products_while_under_way(code(LINES[:-1]))
