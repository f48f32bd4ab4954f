"""What is mutated, and by which tests it has to be noticed."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def _files(*folders: str) -> list[str]:
    found = [p for folder in folders for p in sorted((ROOT / folder).rglob("*.py")) if p.name != "__init__.py"]
    return [str(p.relative_to(ROOT)) for p in found]


TARGETS: dict[str, tuple[list[str], list[str]]] = {
    "layout": (
        _files("dtensor/layout"),
        ["tests/layout", "tests/comm/test_redistribute.py", "tests/mesh/test_links.py"],
    ),
    "rules": (_files("dtensor/rules"), ["tests/rules", "tests/dispatch", "tests/tensor/test_random.py"]),
    "algebra": (
        _files("passes/algebra"),
        ["tests/passes/algebra", "tests/passes/test_pipeline.py", "tests/passes/functional"],
    ),
    "agreement": (
        ["dtensor/comm/agreement.py", "dtensor/comm/replication_check.py", "dtensor/mesh/collective_order.py"],
        [
            "tests/compile/backends/test_agreement.py",
            "tests/compile/backends/test_compare_ranks.py",
            "tests/mesh/test_job.py",
        ],
    ),
}
"""Name -> files, and the tests that are tried."""

OPERATORS = (
    *("AddNot", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ReplaceAndWithOr", "ReplaceOrWithAnd"),
    *("NumberReplacer", "ReplaceBreakWithContinue", "ReplaceContinueWithBreak", "ZeroIterationForLoop"),
    *("ExceptionReplacer", "ReplaceUnaryOperator_USub_UAdd", "ReplaceUnaryOperator_Delete_Not"),
    *("ReplaceUnaryOperator_Delete_USub", "ReplaceComparisonOperator_Is_IsNot", "ReplaceComparisonOperator_IsNot_Is"),
    *("ReplaceComparisonOperator_Eq_NotEq", "ReplaceComparisonOperator_NotEq_Eq", "ReplaceComparisonOperator_Lt_LtE"),
    *("ReplaceComparisonOperator_LtE_Lt", "ReplaceComparisonOperator_Gt_GtE", "ReplaceComparisonOperator_GtE_Gt"),
    *("ReplaceBinaryOperator_Add_Sub", "ReplaceBinaryOperator_Sub_Add", "ReplaceBinaryOperator_Mul_Div"),
    *("ReplaceBinaryOperator_Div_Mul", "ReplaceBinaryOperator_FloorDiv_Mul", "ReplaceBinaryOperator_Mod_Add"),
    *("ReplaceBinaryOperator_BitOr_BitAnd", "ReplaceBinaryOperator_BitAnd_BitOr"),
)
"""Those of Cosmic Ray that change what a program computes; one for each operator, not all by which it could be
replaced."""

_WHY = {
    "one": "the node has one operand, which is its first and its last",
    "note": "which of equal nodes lends its notes makes no difference to the program",
    "never": "no caller gets here",
}
_SAME = (
    ("passes/algebra/reuse_gather.py", "x = x.all_input_nodes[-1]", "one"),
    ("passes/algebra/reuse_gather.py", "node = node.all_input_nodes[-1]", "one"),
    ("passes/algebra/reuse_gather.py", "x, dims = node.all_input_nodes[-1], reduced_dims(node)", "one"),
    (
        "passes/algebra/shard_before_collective.py",
        "x = ir.emit(users[0], replace(shard, x=c.x), like=users[-1])",
        "note",
    ),
    ("passes/algebra/dead_code.py", "return _is_start(node.args[-1])", "one"),
    ("passes/algebra/dead_code.py", "return True", "never"),
    ("passes/algebra/add_before_reduce.py", "break", "never"),
)
EQUIVALENT = {(file, line.replace(" ", "")): _WHY[why] for file, line, why in _SAME}
"""(file, the changed line without its spaces) -> why no test can distinguish the mutant from the original."""
