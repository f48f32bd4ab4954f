"""The examples with trainers of other packages: the losses of one device, however the model is sharded, and resumed."""

import contextlib
import importlib.util
import io
import os
import re
import sys
import warnings
from pathlib import Path

import pytest

from dtensor.testing import run_ranks

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = ROOT / "examples"
NEEDS = {
    "with_trainer": ("transformers", "accelerate"),
    "with_accelerate": ("transformers", "accelerate"),
    "with_lightning": ("transformers", "lightning"),
    "with_sft": ("trl", "datasets"),
}
"""Example -> the packages that it imports."""

NAMED = "from dtensor import Shard, distribute_model, init_device_mesh\nfrom dtensor.parallel import *\n"
TWO = 'mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("{}",))'
STYLES = {"self_attn.[qkv]_proj": "Colwise", "mlp.gate_proj": "Colwise", "mlp.up_proj": "Colwise"}
STYLES |= {"self_attn.o_proj": "Rowwise", "mlp.down_proj": "Rowwise"}
PLAN = ", ".join(f'"model.layers.*.{name}": {style}Parallel()' for name, style in STYLES.items())

SHARDED = {
    "one": ("", "llama()", 1, 1),
    "fully": (TWO.format("dp"), "fully_shard(llama(), mesh)", 2, 2),
    "model's plan": (TWO.format("tp"), 'distribute_model(llama(), mesh, "model", outputs={})', 1, 2),
    "styles": (TWO.format("tp"), f"parallelize_module(llama(), mesh, {{{PLAN}}})", 1, 2),
    "global view": (
        TWO.format("dp"),
        'distribute_model(llama(), mesh, {}, inputs={"dp": Shard(0)}, outputs={"dp": Shard(0)})',
        2,
        2,
    ),
    "both": (
        'mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))',
        'fully_shard(distribute_model(llama(), mesh["tp"], "model", outputs={}), mesh["dp"])',
        2,
        4,
    ),
}
"""How a model is sharded -> its mesh, the model, how many parts a batch has, and on how many ranks."""


def text_of(name, sharded):
    """The script with another mesh and another way to shard the model."""
    mesh, model, parts, ranks = SHARDED[sharded]
    text = (EXAMPLES / f"{name}.py").read_text()
    changes = {
        r"mesh = .*": mesh,
        r"model = .*llama\(\).*": f"model = {model}",
        r"(devices=)mesh.size\(\)": rf"\g<1>{ranks}",
    }
    changes[r"mesh.size\(\)"] = str(parts)
    changes['"per_device_train_batch_size": 8,'] = f'"per_device_train_batch_size": {8 // parts},'
    if sharded == "one":
        changes[r"ShardedStrategy\(\)"] = '"auto"'
    for pattern, new in changes.items():
        text = re.sub(pattern, new, text)
    return NAMED + text


def printed(name, sharded, folder, until):
    """What the script prints, as it does each time it is started."""
    forget_processes()
    kept, out = sys.argv, io.StringIO()
    sys.argv = [name, str(folder), str(until)]
    sys.path.insert(0, str(EXAMPLES))
    try:
        with contextlib.redirect_stdout(out):
            exec(compile(text_of(name, sharded), f"{name}.py", "exec"), {"__name__": "__main__"})
    finally:
        sys.argv = kept
        sys.path.remove(str(EXAMPLES))
    return out.getvalue()


def forget_processes():
    """accelerate keeps what it knows of the processes for as long as Python runs."""
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(True)
        GradientState._reset_state()


def on_rank(rank, runs):
    import torch.distributed as dist

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    os.environ |= {"WORLD_SIZE": str(dist.get_world_size()), "LOCAL_WORLD_SIZE": str(dist.get_world_size())}
    texts = [printed(*run) for run in runs]
    forget_processes()
    return texts


def curve(*texts):
    """Step -> losses and norms; a step that is printed again counts as it was the last time."""
    lines = [line for text in texts for line in re.findall(r"step (\d+) (.*)", text)]
    return {int(step): [float(x) for x in re.findall(r"\d\S*", rest)] for step, rest in lines}


def skip_without(name):
    absent = [package for package in NEEDS[name] if importlib.util.find_spec(package) is None]
    if absent:
        pytest.skip(f"{name} needs {', '.join(absent)}: pip install 'dtensor-compile[trainers]'")


@pytest.mark.parametrize("name", NEEDS)
def test_each_is_short(name):
    lines = (EXAMPLES / f"{name}.py").read_text().partition("\n\n")[2].splitlines()
    assert len([line for line in lines if line.strip()]) <= 25


def one_device(name, folder, until):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return curve(printed(name, "one", folder, until))


def check(wanted, *texts):
    found = curve(*texts)
    assert found.keys() == wanted.keys()
    for step, values in wanted.items():
        assert found[step] == pytest.approx(values, abs=2e-5)


def test_two_ranks_train_as_one_device_and_go_on(tmp_path):
    """Saved fully sharded, and gone on with by the plan of the model."""
    name = "with_trainer"
    skip_without(name)
    chain = (("fully", 2), ("model's plan", 3))
    texts = run_ranks(on_rank, 2, [(name, how, tmp_path / "saved", until) for how, until in chain])[0]
    check(one_device(name, tmp_path / "one", 3), *texts)


@pytest.mark.nightly
@pytest.mark.parametrize("name", NEEDS)
def test_every_kind_of_sharding_goes_on_where_another_stopped(name, tmp_path):
    skip_without(name)
    kinds = [kind for kind in SHARDED if kind != "one"]
    texts = [
        run_ranks(on_rank, SHARDED[kind][3], [(name, kind, tmp_path / "saved", 2 * i)], timeout=580)[0][0]
        for i, kind in enumerate(kinds, 1)
    ]
    check(one_device(name, tmp_path / "one", 2 * len(kinds)), *texts)


def test_the_page_shows_them():
    page = (ROOT / "docs" / "guides" / "trainers.md").read_text()
    for name in NEEDS:
        assert (EXAMPLES / f"{name}.py").read_text().partition("\n\n")[2].strip() in page, name
