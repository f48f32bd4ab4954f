"""Draws one block of Llama as two ranks compute it: sharded by hand, and with layouts that were decided together.

Both are compiled here, on ranks that do not exist, and drawn from the text of their graphs before any pass: what a part
of the block makes is the last value of that part that has dims; where it is follows from its layout, or from its shape
beside that on one device where the graph holds plain local tensors.
"""

import functools
import re
import tempfile
import warnings
from html import escape
from pathlib import Path
from typing import NamedTuple

import torch
import transformers

from dtensor import Shard, distribute_model, init_device_mesh
from dtensor.compile import dump
from dtensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from dtensor.testing import fake_ranks

COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")
BLOCK = "model.layers.0"
PARTS = {
    "first norm": ("input_layernorm",),
    "q, k, v": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention": ("self_attn",),
    "o": ("self_attn.o_proj",),
    "second norm": ("post_attention_layernorm",),
    "gate, up": ("mlp.gate_proj", "mlp.up_proj"),
    "silu, product": ("mlp",),
    "down": ("mlp.down_proj",),
    "sum": ("",),
}
"""Parts of a block -> their modules."""
LINE = re.compile(
    r"%\w+: \w+\[(?P<shape>[\d,]*)\](?:\{(?P<layout>\S+)\})? = (?P<op>[\w.]+)\("
    r"(?:.*  # (?P<bytes>[\d,]+) bytes)?(?:.* in (?P<module>\S+)$)?"
)
"""A line of a graph."""


class Value(NamedTuple):
    """A line of a graph: what it makes, what it sends, and the module in which it stands."""

    shape: tuple[int, ...]
    layout: str
    op: str
    sent: int
    module: str


def _llama() -> torch.nn.Module:
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 1, "vocab_size": 1024}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": False}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, max_position_embeddings=256))


class Graph(NamedTuple):
    """The forward of a compiled step before any pass, and what forward and backward send, in bytes."""

    forward: list[Value]
    sent: int


def _graph(model: torch.nn.Module) -> Graph:
    tokens = torch.zeros(8, 128, dtype=torch.long)
    torch.compiler.reset()
    with tempfile.TemporaryDirectory() as folder:
        with dump(folder):
            run = torch.compile(model, backend="dtensor", options={"inner": "aot_eager"})
            run(input_ids=tokens, labels=tokens).loss.backward()
        forward, backward = (
            _values(next(Path(folder).glob(f"rank0/*/{half}.00_input.txt"))) for half in ("03_forward", "04_backward")
        )
    return Graph(forward, sum([v.sent for v in forward + backward]))


def _values(path: Path) -> list[Value]:
    found = filter(None, map(LINE.match, path.read_text().splitlines()))
    return [
        Value(
            tuple(map(int, filter(None, m["shape"].split(",")))),
            m["layout"] or "",
            m["op"],
            int((m["bytes"] or "0").replace(",", "")),
            (m["module"] or "").removeprefix("[0]."),  # where Dynamo wraps a model
        )
        for m in found
    ]


@functools.cache
def _graphs() -> tuple[Graph, Graph, Graph]:
    """Of one device, by hand, and decided together."""
    with fake_ranks(2), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        plain, hand, decided = _llama(), _llama(), _llama()
        styles = {f"model.layers.*.{n}": ColwiseParallel() for n in COLUMNS} | {
            f"model.layers.*.{n}": RowwiseParallel() for n in ROWS
        }
        parallelize_module(hand, mesh, styles)
        plan = {f"*.{n}.weight": {"tp": Shard(0)} for n in COLUMNS} | {f"*.{n}.weight": {"tp": Shard(1)} for n in ROWS}
        distribute_model(decided, mesh, plan, outputs={}, check_inputs=False)
        return _graph(plain), _graph(hand), _graph(decided)


def _made(graph: Graph, modules: tuple[str, ...]) -> Value:
    """The last activation that the forward makes in one of these modules of the block."""
    names = {f"{BLOCK}.{m}".rstrip(".") for m in modules}
    inside = [
        v
        for v in graph.forward
        if v.module in names and len(v.shape) == 3 and v.shape[-1] > 1 and not v.op.startswith("dtensor")
    ]
    return inside[-1]


def _where(value: Value, whole: tuple[int, ...]) -> str:
    """P, R, or the dim that is cut."""
    if value.layout:
        return value.layout
    cut = [d for d, (a, b) in enumerate(zip(value.shape, whole)) if a != b]
    return f"S({cut[0]})" if cut else "R"


def _moves(graph: Graph, modules: tuple[str, ...]) -> str:
    """What these modules of the block send in the forward."""
    names = {f"{BLOCK}.{m}".rstrip(".") for m in modules}
    sent = [v for v in graph.forward if v.sent and v.module in names]
    kinds: dict[tuple[str, bool], list[int]] = {}
    for v in sent:
        kinds.setdefault((v.op.removeprefix("dtensor."), len(v.shape) == 2), []).append(v.sent)
    return ", ".join(
        f"{len(n)} {op.replace('_', '-')}{'s' * (len(n) > 1)}{' of weights' * weight}, {sum(n) / 1e6:.2f} MB"
        for (op, weight), n in kinds.items()
    )


WIDTH, HEIGHT, STEP, TOP, LEFT, PANEL = 74, 30, 44, 74, 120, 400
BLUE, RED, GRAY, EDGE = "#8db3dd", "#b4551f", "#555", "#345"
TITLES = ("parallelize_module, by hand", "distribute_model, decided together")
LEGEND = (("R", "the whole"), ("S(2)", "a part"), ("P", "a summand of the whole"))


def _text(x: float, y: float, said: str, more: str = "") -> str:
    return f'<text x="{x}" y="{y}" {more}>{escape(said)}</text>'


def _box(x: float, y: float, w: float, h: float, fill: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{w}" height="{h}" fill="{fill}" stroke="{EDGE}"/>'


def _held(x: int, y: int, where: str, rank: int) -> str:
    """What a rank holds of a value of three dims: across are features, down are sequences."""
    box = _box(x, y, WIDTH, HEIGHT, {"R": BLUE, "P": "url(#sum)"}.get(where, "#fff"))
    if where == "S(2)":
        return box + _box(x + rank * WIDTH // 2, y, WIDTH // 2, HEIGHT, BLUE)
    if where == "S(0)":
        return box + _box(x, y + rank * HEIGHT // 2, WIDTH, HEIGHT // 2, BLUE)
    assert where in ("R", "P"), where
    return box


def drawn() -> str:
    """The drawing, as SVG."""
    plain, *both = _graphs()
    tall = TOP + STEP * len(PARTS) + 40
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + 2 * PANEL} {tall}" font-size="13" '
        'font-family="Helvetica, Arial, sans-serif"><defs><pattern id="sum" width="7" height="7" '
        'patternUnits="userSpaceOnUse"><rect width="7" height="7" fill="#fff"/>'
        f'<path d="M0 7 7 0" stroke="{RED}" stroke-width="2"/></pattern></defs>'
        f'<rect width="{LEFT + 2 * PANEL}" height="{tall}" fill="#fff"/>'
    ]
    for k, (title, graph) in enumerate(zip(TITLES, both)):
        left = LEFT + PANEL * k
        out.append(_text(left, 24, title, 'font-weight="bold"'))
        out.append(
            _text(left, 44, f"whole step of the block and the head: {graph.sent / 1e6:.1f} MB", f'fill="{GRAY}"')
        )
        for rank in (0, 1):
            x = left + (WIDTH + 14) * rank
            out.append(_text(x + WIDTH / 2, TOP - 8, f"rank {rank}", f'text-anchor="middle" fill="{GRAY}"'))
            for i, modules in enumerate(PARTS.values()):
                whole = _made(plain, modules).shape
                out.append(_held(x, TOP + STEP * i, _where(_made(graph, modules), whole), rank))
        for i, modules in enumerate(PARTS.values()):
            out.append(_text(left + 2 * WIDTH + 26, TOP + STEP * i + 19, _moves(graph, modules), f'fill="{RED}"'))
    for i, part in enumerate(PARTS):
        out.append(_text(LEFT - 12, TOP + STEP * i + 19, part, 'text-anchor="end"'))
    for k, (where, said) in enumerate(LEGEND):
        x = LEFT + 210 * k
        out.append(_held(x, tall - 36, where, 0) + _text(x + WIDTH + 10, tall - 17, said))
    return "".join(out) + "</svg>"


__all__ = ["drawn"]
