"""The page of a dump: what is in it, and how it behaves in a browser, with a graph of 10,000 nodes."""

import html
import json
import re

import pytest

from dtensor.compile.recording.manifest import FORMAT, totals
from dtensor.compile.reports import page as pages
from tests.compile.reports.browser import in_browser, opened

EVIL = "</script><img src=x onerror=document.title='broken'>"
NODES = 10_000


def collective(k, **changes):
    return {
        "number": k,
        "direction": "forward",
        "op": "all_gather" if k % 3 else "all_reduce",
        "reduce_op": None,
        "axis": "tp",
        "group": "0",
        "ranks": [0, 1],
        "dtype": "float32",
        "shapes": [[4, 8]],
        "bytes": 100 + k,
        "sent": 128,
        "how": "implicit",
        "move": "S(0)->R",
        "file": "/home/u/train.py",
        "line": k + 1,
        "code": EVIL,
        "module": f"layers.{k}",
        "class": "Layer",
        "fixed": 1e-6,
        "link": {},
        "parameter": False,
        "makers": ["mm"],
        "readers": ["mm"],
        "asked": [k],
        "passes": ["lower"],
        "start": k * 1e-5,
        "end": k * 1e-5 + 5e-6,
        "seconds": 5e-6,
        "exposed": k * 1e-9,
        "formula": None,
    } | changes


def manifest(collectives):
    spans = [
        {
            "name": "aten.mm",
            "communicates": False,
            "start": k * 1e-6,
            "end": (k + 1) * 1e-6,
            "exposed": 0.0,
            "number": -1,
        }
        for k in range(NODES)
    ]
    spans += [
        {"name": c["op"], "communicates": True, **{key: c[key] for key in ("start", "end", "exposed", "number")}}
        for c in collectives
    ]
    graph = {"nodes": NODES, "stages": ["input"], "seconds": NODES * 1e-6, "computing": 0.01, "communicating": 1e-3}
    order = [x for c in collectives for x in (c["number"], ~c["number"])]
    graph |= {"order": order, "gaps": [0.0] * len(order), "taken": [0.0] * len(collectives)}
    graph |= {"exposed": 1e-4, "peak_bytes": 4096, "memory": [[k * 1e-6, k] for k in range(4000)], "spans": spans}
    return {
        "format": FORMAT,
        "frame": {"name": "step", "file": "/home/u/train.py", "line": 1, "compile_id": "0/0"},
        "graphs": {"forward": graph},
        "collectives": collectives,
        "removed": [],
        "alternatives": [],
        "passes": [],
        "graph_breaks": [],
        "recompiled": [],
        "totals": totals(collectives),
    }


@pytest.fixture
def dump(tmp_path):
    """Two ranks, of which the second sends one collective more."""
    lines = [f"%mm_{k}: f32[4,8]{{S(0)}} = aten.mm(%x, %y)  # train.py:{k} in layers.{k % 7}" for k in range(NODES)]
    for rank, n in ((0, 30), (1, 31)):
        folder = tmp_path / f"rank{rank}" / "000_step"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(json.dumps(manifest([collective(k) for k in range(n)])))
        (folder / "03_forward.00_input.txt").write_text("\n".join(lines))
        (folder / "03_forward.01_lower.txt").write_text("\n".join([*lines[:5000], f"%new {EVIL}", *lines[5001:]]))
        (folder / "graph_breaks.txt").write_text(f"Graph break at {EVIL}")
    return tmp_path


def test_the_page_is_one_file_and_escapes(dump):
    path = pages.write_page(dump)
    text = path.read_text()
    assert path == dump / "index.html"
    assert not re.search(r"<img|<link|<script src|<iframe|href=\"(?!#)|@import|url\(|https?:", text)
    assert text.count("</script>") == 2
    assert html.escape(EVIL, quote=False).replace("'", "&#39;") in text
    assert EVIL not in text
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])
    assert data["frames"][0]["collectives"][0]["code"] == EVIL


def test_what_the_page_shows(dump):
    text = html.unescape(pages.page(dump))
    assert "0.029 µs of 5 µs exposed: all_gather over tp in forward, 129 bytes, S(0)->R" in text
    assert "not requested (implicit) at /home/u/train.py:30 in layers.29" in text
    assert "rank1, 000_step" in text
    assert "+direction=forward, op=all_reduce" in text
    data = json.loads(re.search(r'id="data">(.*?)</script>', pages.page(dump), re.DOTALL)[1])
    stages = data["frames"][0]["stages"]
    assert [(s["title"], s["diff"]) for s in stages] == [("03_forward.00_input", False), ("03_forward.01_lower", True)]
    assert [line for line in stages[1]["lines"] if line[0] in "+-"] == [
        "-%mm_5000: f32[4,8]{S(0)} = aten.mm(%x, %y)  # train.py:5000 in layers.2",
        f"+%new {EVIL}",
    ]
    assert [row["module"] for row in data["frames"][0]["layers"]] == [f"layers.{k}" for k in range(7)]
    assert data["frames"][0]["layers"][0]["gives"] == "mm_9996: f32[4,8]{S(0)}"


def test_long_graphs_are_compared_without_their_order(monkeypatch):
    monkeypatch.setattr(pages, "LONGEST", 2)
    assert pages.compared(["a", "b", "c"], ["c", "a", "d"]) == ["-b", "+d"]


SCRIPT = """
const rows = () => document.querySelectorAll("#table tbody tr").length;
const first = () => document.querySelector("#table tbody tr").textContent;
const type = (id, value, kind) => { $(id).value = value; $(id).dispatchEvent(new Event(kind)); };
const bytes = (inside) => [...document.querySelectorAll("#table th" + inside)].find((x) => x.textContent === "Bytes");
const press = (key) => $("lanes").dispatchEvent(new KeyboardEvent("keydown", { key }));
said.rows = rows();
said.first = first();
type("filter", "all_reduce layers.2", "input");
said.filtered = rows();
type("filter", "", "input");
bytes(" button").click();
said.bytes = first();
bytes(" button").click();
said.rising = first();
said.sort = bytes("").getAttribute("aria-sort");
said.high = $("space").style.height;
$("code").scrollTop = 5000 * 18;
sight();
said.line = $("lines").textContent.includes("%mm_5000:");
said.inSight = $("lines").children.length;
$("next").click();
said.stage = $("stage").selectedOptions[0].text;
said.plus = document.querySelector("#lines .plus").textContent;
press("n");
said.expanded = document.querySelectorAll("tr.more").length;
const last = [...document.querySelectorAll("#table tbody tr")].pop();
last.click();
said.details = document.querySelector("tr.more").textContent;
last.click();
said.closed = document.querySelectorAll("tr.more").length;
said.about = $("about").textContent;
for (let k = 0; k < 50; k++) { press("+"); press("ArrowRight"); press("-"); }
said.focusable = [...document.querySelectorAll("button, input, select, canvas[tabindex], [tabindex]")].length;
said.title = document.title;
said.images = document.images.length;
said.background = getComputedStyle(document.body).backgroundColor;
said.ready = Number(document.documentElement.dataset.ready);
said.took = performance.now();
"""


@in_browser
def test_in_a_browser(dump):
    said = opened(pages.page(dump), SCRIPT, dump)
    assert (said["rows"], said["filtered"]) == (30, 3)
    assert "layers.29" in said["first"]
    assert "129" in said["bytes"]
    assert "100" in said["rising"]
    assert said["sort"] == "ascending"
    assert (said["high"], said["line"], said["stage"]) == ("180000px", True, "03_forward.01_lower (changes)")
    assert said["inSight"] < 200
    assert said["plus"] == f"+%new {EVIL}"
    assert said["about"].startswith("all_reduce: 5.00 µs from 0.00 µs, 100 bytes over tp, S(0)->R, implicit, layers.0 ")
    assert (said["title"].endswith("what was compiled"), said["images"]) == (True, 0)
    assert said["focusable"] > 20
    assert said["took"] < 10_000
    assert (said["expanded"], said["closed"]) == (0, 0)
    assert "float32 [[4,8]]" in said["details"]
    assert "to write: none; mm needs it at once" in said["details"]


WIDTHS = """
const wide = (e) => e.scrollWidth > e.clientWidth + 1;
said.width = innerWidth;
const all = (selector) => [...document.querySelectorAll(selector)];
said.cut = all("table.fits, table.fits td, div.tall, body").filter(wide).map((e) => e.textContent.slice(0, 60));
said.out = all("table.fits").filter((t) => t.getBoundingClientRect().right > innerWidth).length;
said.tables = document.querySelectorAll("table.fits").length;
document.querySelector("ol.exposed a.go").click();
said.about = $("about").textContent;
said.chosen = [chosen, $("which").selectedOptions[0].text, from > 0, to < 1];
said.focused = document.activeElement.id;
"""


@in_browser
@pytest.mark.parametrize("width", [800, 1400])
def test_no_column_is_cut_off_and_links_lead_into_the_timeline(dump, width):
    (folder,) = (dump / "rank0").iterdir()
    took = {"seconds": 1.234e-3, "exposed": 1.111e-3}
    graph = {"frame": folder.name, "direction": "forward", "runs": 3, "seconds": 0.0123, "agreeing": 0.001}
    found = {"format": "dtensor measured 1", "steps": 3, "graphs": [graph | {"collectives": [took] * 30}]}
    (dump / "rank0" / "measured.json").write_text(json.dumps(found))
    said = opened(pages.page(dump), WIDTHS, dump, f"--window-size={width},2000")
    assert (said["width"], said["tables"], said["cut"], said["out"]) == (width, 3, [], 0)
    assert said["about"].startswith("all_gather: 5.00 µs from 290 µs, 0.0290 µs of it exposed, 129 bytes over tp")
    assert said["about"].endswith("layers.29 train.py:30; measured 1.23 ms, 1.11 ms exposed")
    assert (said["chosen"], said["focused"]) == ([29, "000_step forward", True, True], "lanes")


@in_browser
def test_light_and_dark(dump):
    light, dark = (
        opened(pages.page(dump), SCRIPT, dump, f"--blink-settings=preferredColorScheme={k}")["background"]
        for k in (1, 0)
    )
    assert (light, dark) == ("rgb(255, 255, 255)", "rgb(18, 22, 27)")
