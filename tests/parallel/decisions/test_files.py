"""Decisions in files: what a dump holds is taken again, edited or not, and what cannot be is refused by name."""

import json

import pytest
import torch

from dtensor import distribute_model, init_device_mesh
from dtensor.compile.recording import frames
from dtensor.errors import ArgumentError, PlacementError
from dtensor.parallel.decisions import deciding
from dtensor.testing import fake_ranks

from .test_decisions import AOT, PLAN, QUIET, batch, decoder


@pytest.fixture(scope="module")
def mesh():
    with fake_ranks(2):
        yield init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


def sent(mesh, layers: int = 1, **options) -> list[tuple[str, int]]:
    """What a compiled step sends."""
    torch.compiler.reset()
    model = distribute_model(decoder(layers, 64), mesh, PLAN, **QUIET)
    torch.compile(model, backend="dtensor", options=AOT | options)(batch(8, 64, 64)).square().mean().backward()
    return [(c.sent.op, c.sent.bytes) for story in frames.recent_frames()[-1].stories.values() for c in story.sent]


@pytest.fixture(scope="module")
def dumped(mesh, tmp_path_factory):
    """What a step sends, and what a dump of it says of decisions."""
    folder = tmp_path_factory.mktemp("dump")
    found = sent(mesh, dump=str(folder))
    (path,) = folder.rglob("decisions.json")
    return found, path.read_text()


def given(tmp_path, said) -> str:
    """A folder that holds decisions."""
    (tmp_path / "decisions.json").write_text(json.dumps(said))
    return str(tmp_path)


def test_what_was_dumped_is_taken_and_nothing_decided(mesh, dumped, tmp_path, monkeypatch):
    before, text = dumped
    said = json.loads(text)
    assert said["mesh"] == {"tp": 2}
    assert {row["module"] for row in said["operators"]} >= {"blocks.0.q", "blocks.0.down"}
    with monkeypatch.context() as context:
        context.setattr(deciding, "_solved", None)
        assert sent(mesh, decide=given(tmp_path, said)) == before
    assert sent(mesh, layers=2, decide=str(tmp_path))  # of another program it says nothing


def test_what_is_edited_is_taken(mesh, dumped, tmp_path):
    """Every operator on all of its operands: parameters are gathered, and nothing else is sent."""
    before, text = dumped
    said = json.loads(text)
    for row in said["operators"]:
        row |= {side: [word and "R" for word in row[side]] for side in ("takes", "makes")}
    after = sent(mesh, decide=given(tmp_path, said))
    assert after != before
    assert {op for op, _ in after} == {"all_gather"}


@pytest.mark.parametrize(
    ("side", "word", "error"),
    [
        ("takes", "S(0)", "which its rule does not allow; it allows"),
        ("takes", "S(x)", "write for each axis of the mesh R, S"),
        ("makes", "P(mean)", "write for each axis of the mesh R, S"),
    ],
)
def test_what_cannot_be_is_refused(mesh, dumped, tmp_path, side, word, error):
    said = json.loads(dumped[1])
    row = next(row for row in said["operators"] if row["operator"] == "aten.mm.default")
    row[side] = [word] * len(row[side])
    with pytest.raises(PlacementError, match=error) as raised:
        sent(mesh, decide=given(tmp_path, said))
    assert "aten.mm.default" in str(raised.value)


def test_other_operators_are_refused(mesh, dumped, tmp_path):
    said = json.loads(dumped[1])
    del said["operators"][3]
    with pytest.raises(PlacementError, match="change nothing but takes and makes"):
        sent(mesh, decide=given(tmp_path, said))


def test_a_folder_without_decisions_is_refused(mesh, tmp_path):
    with pytest.raises(ArgumentError, match=r"there is no decisions.json in .*; write the path of a dump"):
        sent(mesh, decide=str(tmp_path))
