"""The page of a comparison: what it embeds of two runs that agree or part, and how it behaves in a browser."""

import copy
import json
import math
import re
from html import unescape

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import dtensor
from dtensor import init_device_mesh
from dtensor.compile.reports import comparison_page
from dtensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from dtensor.runs.comparing.comparison import compare
from dtensor.runs.comparing.values import load
from dtensor.testing import run_threads
from dtensor.tools.cli import main
from tests.compile.reports.browser import in_browser, opened

EVIL = "</script><img src=x onerror=alert(1)>"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.add_module(EVIL, nn.Linear(8, 8))

    def forward(self, x):
        return getattr(self, EVIL)(self.down(torch.relu(self.up(x))))


def trained(model, folder):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dtensor.record(folder):
        model(torch.linspace(-1, 1, 32).view(4, 8)).square().sum().backward()
        optimizer.step()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of the records of one device, of two ranks, and of two ranks of which one has a wrong weight."""
    torch.manual_seed(0)
    model, root = Model(), tmp_path_factory.mktemp("runs")
    trained(copy.deepcopy(model), root / "one")

    def on_rank(rank, name):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        mine = parallelize_module(copy.deepcopy(model), mesh, plan)
        if name == "wrong" and rank == 1:
            with torch.no_grad():
                mine.up.weight.to_local()[2] *= 2
        trained(mine, root / name)

    for name in ("right", "wrong"):
        run_threads(on_rank, 2, name)
    return root


def compared(runs, name):
    return compare(load(runs / "one"), load(runs / name))


def embedded(text):
    return json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1], parse_constant=pytest.fail)


def test_the_page_is_one_file_and_escapes(runs):
    text = comparison_page.page(compared(runs, "right"))
    assert not re.search(r"<img|<link|<script src|<iframe|href=\"(?!#)|@import|url\(|https?:", text)
    assert text.count("</script>") == 2
    assert EVIL not in text
    assert EVIL in {p["module"] for p in embedded(text)["points"]}


def test_runs_that_agree(runs):
    c = compared(runs, "right")
    text = comparison_page.page(c)
    data = embedded(text)
    assert "The runs agree" in text
    assert data["findings"] == []
    assert [p["order"] for p in data["points"]] == sorted(p.b.order for p in c.pairs)
    assert [b["part"] for b in data["bands"]] == ["forward", "backward", "optimizer"]
    assert (data["bands"][0]["from"], data["bands"][-1]["to"]) == (0, len(c.pairs))
    assert all(before["to"] == after["from"] for before, after in zip(data["bands"], data["bands"][1:]))
    for p in data["points"]:
        assert p["difference"] is None or p["difference"] <= float(p["allowed"]), p


def test_a_point_has_all_that_is_known_of_its_value(runs):
    data = embedded(comparison_page.page(compared(runs, "right")))
    (k,) = [k for k, p in enumerate(data["points"]) if (p["op"], p["module"]) == ("addmm", "up")]
    point = data["points"][k]
    assert (point["phase"], point["step"], point["number"]) == ("forward", 0, 0)
    assert re.fullmatch(r"test_comparison_page\.py:\d+", point["line"])
    assert (point["a"], point["b"]) == ("float32[4, 12] on one rank", "float32[4, 12] on tp: S(1)")
    assert {data["points"][i]["module"] for i in point["inputs"]} >= {"up.weight", "up.bias"}
    assert [p["op"] for p in data["points"] if k in p["inputs"]].count("relu") == 1
    assert data["alone"] == []


def test_a_finding_is_marked(runs):
    c = compared(runs, "wrong")
    text = comparison_page.page(c)
    data = embedded(text)
    assert "The runs part" in text
    assert "First unexplained difference: parameter in up.weight" in unescape(text)
    assert len(data["findings"]) == len(c.findings) > 0
    first = data["points"][data["findings"][0]]
    assert (first["op"], first["module"]) == ("parameter", "up.weight")
    assert first["findings"][0]["title"] == "Unexplained difference"
    assert first["findings"][0]["where"] == "[8:9, :], on rank 1"


def test_numbers_that_json_does_not_have():
    assert [comparison_page._number(x) for x in (math.inf, math.nan, 0.0, 0.123456)] == ["Infinity", None, 0.0, 0.1235]


def test_a_finding_about_a_value_of_one_run_has_a_point(runs):
    c = compared(runs, "wrong")
    first = c.findings[0]
    c.pairs = [p for p in c.pairs if p.b is not first.value]
    for f in c.findings[1:]:
        f.run = "A"  # as a difference of replicas of A is
    data = embedded(comparison_page.page(c))
    assert len(data["findings"]) == len(c.findings)
    assert data["points"][data["findings"][0]]["op"] == "parameter"


def test_the_command_writes_it(runs, tmp_path):
    path = tmp_path / "page.html"
    done = CliRunner().invoke(main, ["compare", str(runs / "one"), str(runs / "wrong"), "--html", str(path)])
    assert done.exit_code == 1, done.output
    assert "The runs part" in path.read_text()
    nowhere = ["compare", str(runs / "one"), str(runs / "right"), "--html", str(tmp_path / "none" / "page.html")]
    done = CliRunner().invoke(main, nowhere)
    assert done.exit_code == 2
    assert "cannot be written: No such file or directory" in done.output
    done = CliRunner().invoke(main, ["compare", "--bisect", __file__, "--html", str(path)])
    assert done.exit_code == 2
    assert "--html shows two records" in done.output


SCRIPT = """
const rows = (id) => $(id).tBodies[0].rows;
const type = (id, value) => { $(id).value = value; $(id).dispatchEvent(new Event("input")); };
const press = (key) => $("steps").dispatchEvent(new KeyboardEvent("keydown", { key }));
const title = () => document.querySelector("#chosen h3").textContent;
said.rows = rows("table").length;
said.title = title();
said.inputs = document.querySelectorAll("#chosen a").length;
document.querySelector("#chosen a").click();
const box = $("steps").getBoundingClientRect(), at = places();
const mouse = (kind, k) => $("steps").dispatchEvent(new MouseEvent(kind, {
  clientX: box.left + at.x(k), clientY: box.top + at.y(points[k].difference), bubbles: true }));
const k = points.find((p) => p.op === "addmm" && p.module === "up").k;
mouse("mousemove", k);
said.about = $("about").textContent;
mouse("click", k);
said.clicked = title();
said.line = document.querySelector("#chosen dl").textContent;
type("filter", "finding parameter up");
said.filtered = rows("table").length;
type("filter", "");
[...document.querySelectorAll("#table th button")].find((b) => b.textContent === "Difference / bound").click();
said.worst = rows("table")[0].className;
press("f");
said.next = title();
for (let i = 0; i < 20; i++) { press("+"); press("ArrowRight"); press("n"); press("-"); }
press("0");
said.images = document.images.length;
said.ready = Number(document.documentElement.dataset.ready);
"""


@in_browser
def test_in_a_browser(runs, tmp_path):
    said = opened(comparison_page.page(compared(runs, "wrong")), SCRIPT, tmp_path)
    assert said["rows"] == len(compared(runs, "wrong").pairs)
    assert said["title"] == "parameter in up.weight"
    assert said["inputs"] >= 1
    assert re.fullmatch(r"addmm in up, forward, step 0: \S+ of its norm, bound \S+, \S+", said["about"])
    assert said["clicked"] == "addmm in up"
    assert "test_comparison_page.py:" in said["line"]
    assert said["filtered"] == 1
    assert said["worst"] == "waits"
    assert said["next"] == said["title"]  # the only finding
    assert said["images"] == 0
    assert said["ready"] < 10_000
