"""The structure that ARCHITECTURE.md promises, read off the source: who imports whom, and who names private torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"dtensor": ROOT / "dtensor", "dtensor.compile": ROOT / "compile", "dtensor.passes": ROOT / "passes"}
LINKS = ("compile", "passes")

LAYERS = [
    [
        "errors",
        "_torch",
        "_torch_sizes",
        "_torch_compile",
        "_torch_dynamo",
        "_torch_fsdp",
        "caches",
        "environment",
        "fallback",
        "wrapping",
        "ties",
    ],
    [
        "placements",
        "memory",
        "cost",
        "links",
        "sequences",
        "groups",
        "job",
        "starts",
        "local_sizes",
        "collectives",
        "hooks",
        "invariance",
        "likeness",
        "provenance",
    ],
    ["linear_lse", "layout", "mesh", "notation", "pending", "steps", "agreement", "global_values"],
    ["spec", "plan", "declared"],
    ["redistribute", "exchange", "aliasing", "checkpoint", "sampling", "rules"],
    ["moves", "emptiness"],
    ["strictness", "decision", "boundary", "in_memory"],
    ["dispatch"],
    ["detours", "out"],
    ["tensor"],
    ["composite", "control_flow", "api", "random", "registration", "explanation"],
    [
        "local_functions",
        "linear_loss",
        "exporting",
        "foreign",
        "scaling",
        "checkpoints",
        "checkpoint_files",
        "checkpoint_index",
        "torch_checkpoints",
        "safetensors",
    ],
    ["parallel"],
    ["interop"],
    ["testing"],
    ["demo_plan"],
    ["demo", "calibration", "checkpoint_commands"],
    ["cli", "__main__"],
]
"""Modules of dtensor/, lowest first; each imports from its own layer and those below. `__init__` is above `api`."""


def modules():
    for package, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            inner = path.relative_to(folder)
            if package == "dtensor" and inner.parts[0] in LINKS:
                continue
            name = ".".join((package, *inner.with_suffix("").parts))
            yield name.removesuffix(".__init__"), path


def imports(name, path, top_level_only=False):
    """Full names of the modules that `path` imports."""
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else ast.walk(tree)
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package
            stem = f"{base}.{node.module}" if node.level and node.module else base if node.level else node.module
            yield stem or ""
            yield from (f"{stem}.{a.name}" for a in node.names)


MODULES = dict(modules())


def layer(name):
    part = name.split(".")[1]
    found = [i for i, names in enumerate(LAYERS) if part in names]
    assert found, f"{name}: put its module into LAYERS"
    return found[0]


@pytest.mark.parametrize("name", [n for n in MODULES if n.startswith("dtensor.") and n.split(".")[1] not in LINKS])
def test_core_imports_downwards_and_never_compile_or_passes(name):
    for found in imports(name, MODULES[name], top_level_only=True):
        if not found.startswith("dtensor.") or found.split(".")[1] in ("__version__",):
            continue
        part = found.split(".")[1]
        if name in ("dtensor.demo", "dtensor.cli") and part == "compile":
            continue
        assert part not in LINKS, f"{name} imports {found}"
        assert layer(found) <= layer(name), f"{name} imports {found}, which stands above it"


@pytest.mark.parametrize("name", [n for n in MODULES if n.startswith("dtensor.passes")])
def test_passes_know_the_graph_the_collectives_and_the_rules(name):
    known = ("collectives", "cost", "errors", "_torch", "passes", "provenance", "layout", "spec", "rules")
    allowed = tuple(f"dtensor.{m}" for m in known)
    for found in imports(name, MODULES[name]):
        if found.startswith("dtensor."):
            assert found.startswith(allowed), f"{name} imports {found}"


@pytest.mark.parametrize("name", MODULES)
def test_private_torch_stays_in_five_files(name):
    if name in (
        "dtensor._torch",
        "dtensor._torch_sizes",
        "dtensor._torch_compile",
        "dtensor._torch_dynamo",
        "dtensor._torch_fsdp",
    ):
        return
    tree = ast.parse(MODULES[name].read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            chain, inner = [node.attr], node.value
            while isinstance(inner, ast.Attribute):
                chain, inner = [inner.attr, *chain], inner.value
            if isinstance(inner, ast.Name) and inner.id == "torch" and chain[0] != "ops":
                raise AssertionError(f"{name}:{node.lineno} names torch.{'.'.join(chain)}")
    for found in imports(name, MODULES[name]):
        private = found.startswith("torch.") and any(p.startswith("_") and p != "__init__" for p in found.split("."))
        assert not private, f"{name} imports {found}"
        if name != "dtensor.foreign" or found in imports(name, MODULES[name], top_level_only=True):
            assert not found.startswith("torch.distributed.tensor"), f"{name} imports {found}"


def test_top_level_folders_cannot_be_imported_as_such():
    for folder in LINKS:
        done = subprocess.run([sys.executable, "-c", f"import {folder}"], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode != 0
        assert f"write: import dtensor.{folder}" in done.stderr


def test_torch_outside_the_range_is_one_clear_error():
    from dtensor._torch import check_version

    check_version("2.13.1+cpu")
    for version in ("2.12.0", "2.16.0.dev1", "3.0"):
        with pytest.raises(
            ImportError, match=r"supports torch >=2.13,<2.16 but torch .* is installed; write: pip install"
        ):
            check_version(version)


def test_the_version_is_checked_before_anything_private_is_imported():
    """On another release private names may be missing: the error must still be the clear one."""
    code = "import sys, torch; torch.__version__ = '2.12.0'; sys.modules['torch._decomp'] = None; import dtensor"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    assert "ImportError: dtensor supports torch >=2.13,<2.16 but torch 2.12.0 is installed" in done.stderr
