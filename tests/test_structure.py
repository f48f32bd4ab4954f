"""The structure that ARCHITECTURE.md promises, read off the source: who imports whom, and who names private torch."""

import ast
import os
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

from tests.interpreter import python

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"dtensor": ROOT / "dtensor", "dtensor.compile": ROOT / "compile", "dtensor.passes": ROOT / "passes"}
LINKS = ("compile", "passes")

ROOMS = {
    "dtensor": [
        ["errors"],
        ["torch_private"],
        ["prices"],
        ["layout", "program"],
        ["job"],
        ["mesh"],
        ["comm"],
        ["rules"],
        ["dispatch"],
        ["tensor"],
        ["parallel"],
        ["state"],
        ["interop", "runs"],
        ["testing"],
        ["tools"],
        ["__main__"],
    ],
    "dtensor.parallel": [
        ["modules"],
        ["checks"],
        ["fsdp"],
        ["styles", "whole_model", "training"],
        ["search"],
        ["decisions"],
    ],
    "dtensor.runs": [["records"], ["comparing", "traces", "watching"]],
    "dtensor.rules": [
        ["rule"],
        ["call"],
        ["attention_blocks", "choose", "grouped_rows", "local_calls", "notation", "sampling"],
        ["expert_layers", "plan"],
        ["bind"],
        ["families"],
        ["lookup"],
    ],
    "dtensor.passes": [
        ["graph"],
        ["stages"],
        ["functional", "algebra", "overlap", "borders"],
        ["pipeline"],
        ["runner"],
    ],
    "dtensor.compile": [["estimates"], ["recording"], ["backends"], ["bisect", "packages", "reports", "whole_step"]],
}
"""Package -> its rooms, lowest first: each imports from itself and from those below, never from one beside it."""

ENTRIES = 17
"""As many files and folders a folder may hold beside `__init__.py`, so that its listing is read at a glance."""

LISTS = ("dtensor.rules.families", "dtensor.passes.algebra")
"""Folders that are lists, of which each file is one of a kind: CONTRIBUTING invites to add to them."""

PASSES_KNOW = (
    "torch_private",
    "errors",
    "prices",
    "layout",
    "job.groups",
    "job.collective_order",
    "mesh.tensor_spec",
    "mesh.provenance",
    "program.source_lines",
    "program.stages",
    "comm.agreement",
    "comm.collectives",
    "comm.host_memory",
    "comm.row_encoding",
    "comm.profiled",
    "comm.replication_check",
    "comm.start_collectives",
    "comm.wire_dtypes",
    "rules",
)
"""What the passes know of dtensor: a graph, the collectives and the rules; neither tensors nor a job."""

COMMANDS = ("dtensor.tools.cli", "dtensor.tools.demo", "dtensor.tools.run_commands", "dtensor.tools.plan_command")
"""The tools that also show what is compiled."""

PRIVATE = "dtensor.torch_private."


def modules():
    for package, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            inner = path.relative_to(folder)
            if package == "dtensor" and inner.parts[0] in LINKS:
                continue
            name = ".".join((package, *inner.with_suffix("").parts))
            yield name.removesuffix(".__init__"), path


@cache
def parsed(path):
    return ast.parse(path.read_text())


@cache
def nodes(path):
    return list(ast.walk(parsed(path)))


@cache
def imports(name, path, top_level_only=False):
    """Full names of the modules that `path` imports."""
    return list(_imports(name, path, parsed(path).body if top_level_only else nodes(path)))


def _imports(name, path, among):
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in among:
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package
            stem = f"{base}.{node.module}" if node.level and node.module else base if node.level else node.module
            yield stem or ""
            yield from (f"{stem}.{a.name}" for a in node.names)


MODULES = dict(modules())
NAMES = {f"dtensor.{name}" for name in ("__version__",)}


def is_other(package, name):
    """Whether a name of dtensor is one of the packages that stand beside its rooms."""
    return package == "dtensor" and name.split(".")[1] in LINKS


def floor(package, name):
    """The room of a module in a package, and the floor it is on."""
    part = name.removeprefix(f"{package}.").split(".")[0]
    found = [i for i, rooms in enumerate(ROOMS[package]) if part in rooms]
    assert found, f"{name}: put its room into ROOMS"
    return part, found[0]


@pytest.mark.parametrize("package", ROOMS)
def test_rooms_import_downwards(package):
    """Not through a late import either; `compile` and `passes` are imported when something is compiled."""
    wrong = []
    for name in MODULES:
        if not name.startswith(f"{package}.") or is_other(package, name):
            continue
        room, here = floor(package, name)
        for found in imports(name, MODULES[name]):
            if not found.startswith(f"{package}.") or found in NAMES:
                continue
            if is_other(package, found):
                wrong += [] if name in COMMANDS else [f"{name} imports {found}"]
                continue
            other, there = floor(package, found)
            if there >= here and other != room:
                wrong.append(f"{name} imports {found}, which stands above or beside it")
    assert not wrong, "\n".join(wrong)


def test_no_two_modules_import_each_other():
    """At their top, where it would fail or not by the order of imports."""
    waiting = {n: {m for m in imports(n, p, top_level_only=True) if m in MODULES} - {n} for n, p in MODULES.items()}
    packages = {n for n, p in MODULES.items() if p.name == "__init__.py"}
    waiting = {n: found - packages for n, found in waiting.items() if n not in packages}
    while waiting:
        free = {n for n, found in waiting.items() if not found & waiting.keys()}
        assert free, f"a circle among {sorted(waiting)}"
        waiting = {n: found for n, found in waiting.items() if n not in free}


def test_a_listing_is_read_at_a_glance():
    for name, path in MODULES.items():
        if path.name != "__init__.py":
            continue
        links = LINKS if path.parent == FOLDERS["dtensor"] else ()
        entries = [p for p in path.parent.iterdir() if p.suffix != ".typed" and not p.name.startswith("__")]
        entries = [p for p in entries if p.name not in links]
        entries = [p for p in entries if not p.is_symlink()]  # they stand at the top
        assert name in LISTS or len(entries) <= ENTRIES, f"{name} holds {len(entries)}"
        assert ast.get_docstring(parsed(path)), f"{name} does not say what it is for"
    assert {p.parent for p in MODULES.values()} == {p.parent for p in MODULES.values() if p.name == "__init__.py"}


PYTHONS = {
    "dtensor.compile.packages.identities": "caught where a package is written",
    "dtensor.prices.calibrated": "part of the error about the file",
    "dtensor.parallel.whole_model.plan": "part of the error about the file",
    "dtensor.passes.graph.simulate": "what a simulated rank would raise",
    "dtensor.runs.records.storage": "part of the error about the file",
    "dtensor.state.index": "part of the error about the file",
    "dtensor.tensor.composite_operators": "what one device raises",
}
"""Modules that raise errors of Python's own classes -> why. All others raise those of `dtensor.errors`."""


def test_errors_are_of_one_tree():
    builtin = {"ValueError", "TypeError", "RuntimeError", "NotImplementedError", "KeyError", "FileNotFoundError"}
    wrong = {}
    for name in MODULES.keys() - PYTHONS.keys():
        raised = [n.exc for n in nodes(MODULES[name]) if isinstance(n, ast.Raise)]
        classes = [x.func if isinstance(x, ast.Call) else x for x in raised]
        wrong[name] = {x.id for x in classes if isinstance(x, ast.Name)} & builtin
    assert not any(wrong.values()), f"write a class of dtensor.errors: { ({k: v for k, v in wrong.items() if v}) }"


UNTESTED = {"errors", "torch_private", "__main__", "stages", "pipeline", "runner", "families", "estimates"}
"""Rooms that have no folder of tests: files, and what the tests of those above show."""


@pytest.mark.parametrize("package", ["dtensor", "dtensor.passes", "dtensor.compile", "dtensor.parallel"])
def test_tests_mirror_the_rooms(package):
    folder = ROOT.joinpath("tests", *package.split(".")[1:])
    missing = [room for rooms in ROOMS[package] for room in rooms if not (folder / room).is_dir()]
    assert set(missing) <= UNTESTED, f"no tests of {missing} in {folder.relative_to(ROOT)}"


def test_passes_know_the_graph_the_collectives_and_the_rules():
    allowed = ("dtensor.passes", *[f"dtensor.{m}" for m in PASSES_KNOW])
    for name in [n for n in MODULES if n.startswith("dtensor.passes")]:
        for found in imports(name, MODULES[name]):
            if found.startswith("dtensor."):
                assert found.startswith(allowed) or any(m.startswith(found) for m in allowed), f"{name} imports {found}"


def private_names(name):
    """What a module names of torch that is not public."""
    for node in nodes(MODULES[name]):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            chain, inner = [node.attr], node.value
            while isinstance(inner, ast.Attribute):
                chain, inner = [inner.attr, *chain], inner.value
            if isinstance(inner, ast.Name) and inner.id == "torch" and chain[0] != "ops":
                yield f"{name}:{node.lineno} names torch.{'.'.join(chain)}"
    for found in imports(name, MODULES[name]):
        private = found.startswith("torch.") and any(p.startswith("_") and p != "__init__" for p in found.split("."))
        torchs = found.startswith("torch.distributed.tensor") and (
            name != "dtensor.tensor.torch_dtensor" or found in imports(name, MODULES[name], top_level_only=True)
        )
        if private or torchs:
            yield f"{name} imports {found}"


def test_private_torch_stays_in_one_room():
    wrong = [line for name in MODULES if not name.startswith(PRIVATE) for line in private_names(name)]
    assert not wrong, "\n".join(wrong)


PASSES = tuple(f"dtensor.passes.{room}." for room in ("algebra", "borders", "functional", "overlap"))
"""The rooms of the passes, and of what they share: only what stands there changes a graph."""

CHANGES_GRAPHS = {
    "dtensor.passes": "gives out what passes of a program write with",
    "dtensor.passes.graph.copying": "makes a copy",
    "dtensor.passes.graph.ir": "what passes write with",
    "dtensor.passes.graph.node_order": "what passes reorder with",
    "dtensor.passes.graph.ordered": "what passes fix an order with",
    "dtensor.passes.graph.sizes": "writes the numbers that symbols turned out to be, before each pass",
    "dtensor.torch_private.compiling": "Inductor's function for a fixed order",
    "dtensor.torch_private.partitioning": "a part of torch's partitioner",
    "dtensor.torch_private.symbolic_sizes": "mends a call that torch wrote wrongly, before the first stage",
    "dtensor.compile.bisect.rebuild": "builds a graph from a script",
    "dtensor.compile.bisect.judging": "completes the copy of a graph on which a pass was stopped",
}
"""Other modules that change or build graphs -> why they are no pass."""

WRITES = {
    *("call_function", "create_node", "node_copy", "placeholder", "inserting_before", "inserting_after"),
    *("erase_node", "eliminate_dead_code", "replace_all_uses_with", "replace_input_with", "insert_arg", "update_arg"),
    *("prepend", "order_after", "preserve_node_ordering", "set_codegen"),
}
"""Functions of torch by which a graph is changed."""

OURS = {
    "ir": {"insert", "emit", "replace", "redirect", "stand_in", "stand_for_all", "copy"},
    "node_order": {"rearrange", "sort"},
    "ordered": {"after"},
}
"""Module of `dtensor.passes.graph` -> its functions that change a graph."""


def writes_of(path):
    """What a module does to graphs: calls by which one is changed, and assignments to what a node calls and reads."""
    helpers = {name: module for module, names in OURS.items() for name in names}
    for node in nodes(path):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
            if node.func.attr in WRITES or node.func.attr in OURS.get(owner, ()):
                yield node.lineno, node.func.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in WRITES:
            yield node.lineno, node.func.id
        elif isinstance(node, ast.ImportFrom) and (node.module or "").rpartition(".")[2] in OURS:
            yield from (
                (node.lineno, a.name) for a in node.names if helpers.get(a.name) == node.module.rpartition(".")[2]
            )
        elif isinstance(node, ast.Assign):
            targets = [t for x in node.targets for t in ast.walk(x) if isinstance(t, ast.Attribute)]
            written = [t for t in targets if t.attr in ("args", "kwargs", "target")]
            own = [t for t in written if isinstance(t.value, ast.Name) and t.value.id == "self"]
            yield from ((t.lineno, f"{t.attr} =") for t in written if t not in own)


def test_only_passes_change_graphs():
    """So each change of a graph has its place in `dtensor.passes.STAGES`, and is verified, dumped and bisected."""
    wrong = {}
    for name, path in MODULES.items():
        if name in CHANGES_GRAPHS:
            assert list(writes_of(path)), f"{name} changes no graph; remove it from CHANGES_GRAPHS"
        of_graphs = any(found.startswith(("torch.fx", "dtensor.passes")) for found in imports(name, path))
        if name.startswith(PASSES) or name in CHANGES_GRAPHS or not (of_graphs or "fx" in path.read_text()):
            continue
        if found := list(writes_of(path)):
            wrong[name] = found
    assert not wrong, f"{wrong}: make each change of a graph a pass of a stage (CONTRIBUTING, Add a pass)"


def undocumented():
    """Public functions and classes of modules without a docstring; of several `overload`s the last has it."""
    for name, path in modules():
        last = {node.name: node for node in parsed(path).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        for node in last.values():
            if not node.name.startswith("_") and ast.get_docstring(node) is None:
                yield f"{name}.{node.name}"


def test_public_functions_and_classes_have_docstrings():
    assert list(undocumented()) == []


def test_top_level_folders_cannot_be_imported_as_such():
    for folder in LINKS:
        done = subprocess.run([sys.executable, "-c", f"import {folder}"], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode != 0
        assert f"write: import dtensor.{folder}" in done.stderr


WITHOUT_LINKS = """
import torch, dtensor
from dtensor.compile.backends import inductor
from dtensor.program.source_lines import is_users

read = inductor.get_hash_for_files
inductor.get_hash_for_files = lambda files: print(len(files)) or read(files)
print(is_users(dtensor.compile.backend.__code__.co_filename), inductor.source_hash().hex())
inductor.source_hash.cache_clear(), read.cache_clear()
with open("passes/pipeline.py", "a") as file:
    file.write("# edited")
print(inductor.source_hash().hex())
mesh = dtensor.init_device_mesh("cpu", (1,))
x = dtensor.ones(3, device_mesh=mesh, placements=[dtensor.Shard(0)])
print(torch.compile(torch.sum, backend="dtensor", options={"inner": "aot_eager"})(x).full_tensor().item())
"""


def test_a_clone_without_links_works_alike(tmp_path):
    """git writes a link's path as a file where it may not make links."""
    from dtensor.compile.backends.inductor import source_hash

    for name in ("dtensor", *LINKS):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in LINKS:
        (tmp_path / "dtensor" / name).unlink()
        (tmp_path / "dtensor" / name).write_text(f"../{name}")
    code = [python(), "-c", WITHOUT_LINKS]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(code, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    count, users, before, again, after, total = done.stdout.split()
    assert (int(count), users, again, float(total)) == (len(MODULES), "False", count, 3.0)
    assert before == source_hash().hex() != after


def test_torch_outside_the_range_is_one_clear_error():
    from dtensor.torch_private.core import check_version

    check_version("2.13.1+cpu")
    for version in ("2.12.0", "2.16.0.dev1", "3.0"):
        with pytest.raises(
            ImportError, match=r"supports torch >=2.13,<2.16 but torch .* is installed; write: pip install"
        ):
            check_version(version)


def test_the_version_is_checked_before_anything_private_is_imported():
    """On another release private names may be missing: the error must still be the clear one."""
    code = "import sys, torch; torch.__version__ = '2.12.0'; sys.modules['torch._decomp'] = None; import dtensor"
    done = subprocess.run([python("torch"), "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    assert "ImportError: dtensor supports torch >=2.13,<2.16 but torch 2.12.0 is installed" in done.stderr


def test_what_no_step_needs_is_imported_when_it_is_named():
    code = """
import sys, dtensor
modules = {name: target.partition(":")[0] for name, target in dtensor._ON_DEMAND.items()}
early = [m for name, m in modules.items() if m in sys.modules and name != "record"]  # operators of taps need it
assert not early, early
assert {*dtensor._ON_DEMAND} <= {*dir(dtensor)}
for name in (*dtensor._ON_DEMAND, *dtensor.__all__):
    assert getattr(dtensor, name) is vars(dtensor)[name], name
assert {*modules.values()} <= {*sys.modules}
"""
    run(code)


MODULES_OF_IMPORT = 230
"""As many modules `import dtensor` may import beyond those of `import torch`; about 190 of today's are its own."""


def run(code):
    """Run a program in a process that has imported torch alone, as all of them begin with that."""
    done = subprocess.run([python("torch"), "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_what_is_slow_to_import_waits_until_it_is_needed():
    """Without Dynamo, Inductor, sympy and torch's DTensor, checkpoints and FSDP."""
    slow = "torch._dynamo", "torch._inductor", "sympy", "torch.distributed.tensor", "torch.distributed.checkpoint"
    code = f"""
import sys, torch
before = {{*sys.modules}}
import dtensor
new = {{*sys.modules}} - before
early = [name for name in {(*slow, "torch.distributed.fsdp")} if name in new]
assert not early, early
assert len(new) <= {MODULES_OF_IMPORT}, (len(new), sorted(new))
"""
    run(code)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("torch._dynamo", "torch._inductor.config"),
        ("torch.distributed.checkpoint.state_dict", "torch._dynamo"),
        ("torch.fx.experimental.symbolic_shapes", "torch._inductor.codecache"),
        ("torch", "torch._functorch.aot_autograd"),
        ("torch", "dtensor.tensor.plain_passes, torch.distributed.checkpoint.state_dict"),
    ],
)
def test_torch_is_changed_whichever_is_imported_first(before, after):
    """That the names exist says nothing: the changes are looked up where torch does, in a fresh process."""
    code = f"""
import operator, {before}
import dtensor
import {after}
import sympy, torch._dynamo, torch._inductor.config
from torch._dynamo import convert_frame, output_graph, utils
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.variables import builder, higher_order_ops
from torch.distributed import _state_dict_utils
from torch.fx.experimental.proxy_tensor import _sympy_handlers
from torch._inductor import config
from dtensor.tensor.compile_hooks import backend
from dtensor.tensor.plain_passes import PlainPartition, PlainPasses

assert lookup_backend("dtensor") is backend
for passes in (config.joint_custom_pre_pass, config.post_grad_custom_pre_pass):
    assert [type(p) for p in passes] == [PlainPasses]
assert type(config.custom_partitioner_fn) is PlainPartition and config.custom_partitioner_fn.then is None
changed = (
    convert_frame.ConvertFrameAssert.__call__,
    builder._automatic_dynamic,
    higher_order_ops.get_tensor_storages,
    output_graph.SubgraphTracer.track_produced_symints,
    utils.ChromiumEventLogger.log_event_start,
    _state_dict_utils._distribute_tensors,
)
for function in changed:
    assert function.__code__.co_filename.startswith(dtensor.__path__[0]), function
    wrapped = getattr(function, "__wrapped__", None)
    assert wrapped is None or not wrapped.__code__.co_filename.startswith(dtensor.__path__[0]), f"{{function}} twice"
assert _sympy_handlers()[sympy.Pow] is operator.pow
"""
    run(code)


def test_every_package_is_in_the_wheel():
    """CI builds the wheel and imports it, but only at its end."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    there = {name if path.name == "__init__.py" else name.rpartition(".")[0] for name, path in MODULES.items()}
    assert sorted(listed) == sorted(there)
