"""Who holds which part: the drawing with letters, and the picture."""

import itertools
import re

import numpy as np
import pytest
import torch

import dtensor
from dtensor import Partial, PlacementError, Replicate, Shard, distribute_tensor, init_device_mesh, visualize
from dtensor.tensor.visualize import ranks_text
from dtensor.testing import with_threads

R, S = Replicate(), Shard

DRAWINGS = [
    (
        ((8, 6), {"dp": 2, "tp": 2}, [S(0), S(1)]),
        """
(8, 6) on a mesh dp=2, tp=2: Shard(0) over dp, Shard(1) over tp
      0:3      3:6
    ┌────────┬────────┐
0:4 │ rank 0 │ rank 1 │
    ├────────┼────────┤
4:8 │ rank 2 │ rank 3 │
    └────────┴────────┘
""",
    ),
    (
        ((5, 6), {"dp": 2, "tp": 2}, [R, S(0)]),
        """
(5, 6) on a mesh dp=2, tp=2: Replicate() over dp, Shard(0) over tp
      0:6
    ┌────────────┐
0:3 │ ranks 0, 2 │
    ├────────────┤
3:5 │ ranks 1, 3 │
    └────────────┘
""",
    ),
    (
        ((5, 6), {"dp": 2, "tp": 2}, [Partial(), R]),
        """
(5, 6) on a mesh dp=2, tp=2: Partial() over dp, Replicate() over tp
      0:6
    ┌────────────────────┐
0:5 │ ranks 0 + 2, 1 + 3 │
    └────────────────────┘
""",
    ),
    (
        ((5,), (4,), [S(0)]),
        """
(5,) on a mesh axis 0=4: Shard(0) over axis 0
  0:2      2:4      4:5
┌────────┬────────┬────────┐
│ rank 0 │ rank 1 │ rank 2 │
└────────┴────────┴────────┘
rank 3: nothing
""",
    ),
    (
        ((), (16,), [Partial("avg")]),
        """
() on a mesh axis 0=16: Partial("avg") over axis 0
┌────────────────────────┐
│ ranks avg(0, 1, …, 15) │
└────────────────────────┘
""",
    ),
    (
        ((4, 6, 8), (2, 2, 2), [S(2), S(1), S(0)]),
        """
(4, 6, 8) on a mesh axis 0=2, axis 1=2, axis 2=2: Shard(2) over axis 0, Shard(1) over axis 1, Shard(0) over axis 2
down: dim 1, across: dim 2
[0:2, :, :]
      0:4      4:8
    ┌────────┬────────┐
0:3 │ rank 0 │ rank 4 │
    ├────────┼────────┤
3:6 │ rank 2 │ rank 6 │
    └────────┴────────┘
[2:4, :, :]
      0:4      4:8
    ┌────────┬────────┐
0:3 │ rank 1 │ rank 5 │
    ├────────┼────────┤
3:6 │ rank 3 │ rank 7 │
    └────────┴────────┘
""",
    ),
    (
        ((4, 6, 8), (2,), [S(1)]),
        """
(4, 6, 8) on a mesh axis 0=2: Shard(1) over axis 0
down: dim 1, across: dim 2
      0:8
    ┌────────┐
0:3 │ rank 0 │
    ├────────┤
3:6 │ rank 1 │
    └────────┘
""",
    ),
    (
        ((2, 2), (2, 2), [Partial("max"), Partial()]),
        """
(2, 2) on a mesh axis 0=2, axis 1=2: Partial("max") over axis 0, Partial() over axis 1
      0:2
    ┌─────────────────────────┐
0:2 │ ranks max(0 + 1, 2 + 3) │
    └─────────────────────────┘
""",
    ),
    (
        ((8, 8), (2, 2), [S(0, cut=1), S(0, cut=0)]),
        """
(8, 8) on a mesh axis 0=2, axis 1=2: Shard(0, cut=1) over axis 0, Shard(0, cut=0) over axis 1
      0:8
    ┌────────┐
0:2 │ rank 0 │
    ├────────┤
2:4 │ rank 2 │
    ├────────┤
4:6 │ rank 1 │
    ├────────┤
6:8 │ rank 3 │
    └────────┘
""",
    ),
]


@pytest.mark.parametrize(("arguments", "drawing"), DRAWINGS)
def test_drawings(arguments, drawing):
    assert visualize(*arguments).text() == drawing.strip("\n")


def test_wide_grids_become_lists_and_long_ones_are_shortened():
    wide = visualize((2, 640), (64,), [S(1)]).text(80).splitlines()
    assert wide[1:3] == ["  [0:2, 0:10]     rank 0", "  [0:2, 10:20]    rank 1"]
    assert "  … 40 more" in wide
    assert wide[-1] == "  [0:2, 630:640]  rank 63"
    long = visualize((640, 2), (64,), [S(0)]).text(80).splitlines()
    assert "rank 0" in long[3]
    assert "rank 63" in long[-2]
    assert any("… 40 more" in line for line in long)
    assert max(map(len, visualize((2, 640), (8,), [S(1)]).text(60).splitlines()[1:])) < 60


def test_ranks_as_text():
    assert ranks_text([0]) == "rank 0"
    assert ranks_text([1, 3]) == "ranks 1, 3"
    assert ranks_text([0, 1, 2, 4]) == "ranks 0-2, 4"
    assert ranks_text([0, 2, 4, 6, 8, 10]) == "ranks 0, 2, …, 10"


def ranks_in(text):
    """ "ranks 0-2, 4" -> 0, 1, 2, 4"""
    for begin, end in re.findall(r"(\d+)(?:-(\d+))?", text):
        yield from range(int(begin), int(end or begin) + 1)


@with_threads(4)
def test_every_rank_holds_what_is_drawn(rank):
    """For layouts over two axes of tensors of several sizes: where a rank is named, there are its values."""
    mesh = init_device_mesh("cpu", (2, 2))
    for shape in ((4, 4), (5, 3), (1, 2), (3, 4, 5)):
        x = torch.arange(1.0, 1 + np.prod(shape)).view(shape)
        for placements in itertools.product([R, *map(S, range(len(shape)))], repeat=2):
            d = distribute_tensor(x, mesh, placements)
            shown = visualize(d)
            found = []
            for grid in shown.grids:
                outer = [] if not grid.title else [part.split(":") for part in grid.title[1:-1].split(", ")]
                for row, texts in zip(grid.rows, grid.holders):
                    for column, text in zip(grid.columns, texts):
                        if rank in ranks_in(text):
                            part = [slice(None)] * x.dim()
                            for dim, ends in enumerate(outer):
                                part[dim] = slice(*[int(end) for end in ends if end.strip()] or [None])
                            part[shown.dims[0]], part[shown.dims[1]] = slice(*row), slice(*column)
                            found.append(x[tuple(part)])
            if found:
                assert len(found) == 1
                assert found[0].equal(d.to_local()), (shape, placements)
            else:
                assert d.to_local().numel() == 0
                assert rank in ranks_in(shown.empty)


@with_threads(2)
def test_dtensors(rank):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = dtensor.zeros(4, 2, dtype=torch.bfloat16, device_mesh=mesh, placements=[S(0)])
    assert str(visualize(x)).splitlines()[0] == "bfloat16 (4, 2) on a mesh tp=2: Shard(0) over tp"
    assert visualize((4, 2), mesh, [S(-2)]).text().splitlines()[1:] == visualize(x).text().splitlines()[1:]
    with pytest.raises(TypeError, match=r"write visualize\(x\)"):
        visualize(x, mesh)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((torch.ones(2),), "got a plain tensor, which every rank has for itself"),
        (((2, "a"), (2,)), r"the shape of a tensor .*got \(2, 'a'\)"),
        (((2, 2),), r"a shape needs a mesh and placements: visualize\(\(8, 6\), mesh"),
        (((2, 2), 2, [S(0)]), "mesh must be a DeviceMesh or sizes, .* got 2"),
        (((2, 2), (2, 0), [S(0), R]), "mesh must be a DeviceMesh or sizes"),
    ],
)
def test_what_is_not_taken(arguments, said):
    with pytest.raises(TypeError, match=f"(?s){said}"):
        visualize(*arguments)
    with pytest.raises(PlacementError, match="1 axis but 2 placements"):
        visualize((2, 2), (2,), [R, R])


def test_pictures(tmp_path):
    for arguments, _ in DRAWINGS[-4:]:
        shown = visualize(*arguments)
        shown.save(tmp_path / "p.svg")
        assert (tmp_path / "p.svg").read_text().count("<svg") == 1
        figure = shown.figure()
        texts = {text.get_text() for ax in figure.axes for text in ax.texts}
        assert texts == {text for grid in shown.grids for row in grid.holders for text in row}
        patches = [patch for ax in figure.axes for patch in ax.patches]
        assert len(patches) == 2 * sum(len(row) for grid in shown.grids for row in grid.holders)
        assert any(patch.get_hatch() for patch in patches) == ("Partial" in shown.title)
    assert shown._repr_png_().startswith(b"\x89PNG")


def test_without_matplotlib(monkeypatch):
    monkeypatch.setattr("dtensor.tensor.picture.importlib.util.find_spec", lambda name: None)
    shown = visualize((2, 2), (2,), [S(0)])
    assert shown._repr_png_() is None
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'dtensor-compile\[plot\]'"):
        shown.figure()
