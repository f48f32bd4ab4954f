"""The share of compile time that goes into the passes: `python bench/compile_time.py`.

One process on a fake process group compiles forward and backward of a Transformer, sharded with tensor parallelism and
with sequence parallelism, by `backend="dtensor"`, into a graph that runs operator by operator and by Inductor.
The clock runs from the call to the end of the backward, caches of compiled code passed over; the passes are timed
one by one, and so are what stands around them: verifying, counting, what is known of meshes, sealing the agreement.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import click
import torch

from dtensor import init_device_mesh
from dtensor.compile import Statistics, statistics
from dtensor.testing import ModelArgs, Transformer, fake_ranks

PARTS = {
    "verify": "dtensor.passes.pipeline.verify_graph",
    "count": "dtensor.passes.pipeline.count",
    "list collectives": "dtensor.passes.collectives",
    "seal agreement": "dtensor.compile.pipeline.seal",
    "know meshes": "dtensor.compile.pipeline.mesh_groups",
    "take down what is sent": "dtensor.compile.pipeline.finished",
}
"""What is timed beside the passes -> the name under which it is called."""

WHOLE = ("dtensor.compile.backend.simplify_joint", "dtensor.compile.backend.optimise")
WHOLE_INDUCTOR = ("dtensor.compile.inductor.simplify_joint", "dtensor.compile.inductor.optimise")


@contextmanager
def timed(names: dict[str, str], seconds: dict[str, float]) -> Iterator[None]:
    """Add the time of each call of what `names` names to `seconds`, under its key."""

    def wrapped(key: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return run(*args, **kwargs)
            finally:
                seconds[key] += time.perf_counter() - start

        return call

    with ExitStack() as stack:
        for key, name in names.items():
            patcher = patch(name)
            original, _ = patcher.get_original()
            stack.enter_context(patch(name, wrapped(key, original)))
        yield


def compile_step(layers: int, sequence: bool, inner: str) -> tuple[float, float, dict[str, float], Statistics]:
    """Seconds of forward and backward with compilation, of all our work in it, of its parts; and the statistics."""
    torch.compiler.reset()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    args = ModelArgs(n_layers=layers, dropout_p=0.0, vocab_size=32, weight_tying=False)
    model = torch.compile(
        Transformer.parallelize(Transformer(args), mesh, sequence), backend="dtensor", options={"inner": inner}
    )
    ours: dict[str, float] = defaultdict(float)
    parts: dict[str, float] = defaultdict(float)
    whole = {name: name for name in (*WHOLE, *WHOLE_INDUCTOR)}
    with statistics() as s, timed(whole, ours), timed(PARTS, parts):
        start = time.perf_counter()
        model(torch.zeros(2, 16, dtype=torch.long)).sum().backward()
        total = time.perf_counter() - start
    return total, sum(ours.values()), parts, s


def breakdown(parts: dict[str, float], s: Statistics) -> list[tuple[str, float, int]]:
    """(name, seconds, rewrites) of each pass and part, the slowest first."""
    seconds = defaultdict(float, parts)
    rewrites: Counter[str] = Counter()
    for p in [p for record in s.records for p in record.passes]:
        seconds[p.name] += p.seconds
        rewrites[p.name] += p.rewrites
    return [(name, t, rewrites[name]) for name, t in sorted(seconds.items(), key=lambda item: -item[1])]


@click.command(help=__doc__)
@click.option("--layers", default=32, show_default=True)
@click.option("--inner", "inners", multiple=True, default=("aot_eager", "inductor"), show_default=True)
@click.option("--plan", "plans", multiple=True, default=("tp", "sp"), show_default=True)
def main(layers: int, inners: tuple[str, ...], plans: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    click.echo(f"torch {torch.__version__}; forward and backward of {layers} layers, 2 ranks, seconds")
    with fake_ranks(2):
        compile_step(1, False, inners[0])  # what is imported and registered on first use
        for inner in inners:
            for plan in plans:
                total, ours, parts, s = compile_step(layers, plan == "sp", inner)
                click.echo(f"\n{inner}, {plan}: {total:.1f}, of which the passes and all around {ours:.2f}", nl=False)
                click.echo(f" ({100 * ours / total:.1f} %); graph breaks: {s.graph_breaks}")
                for name, t, rewrites in breakdown(parts, s):
                    click.echo(f"  {name:24}{t:8.3f}{100 * t / total:7.2f} %" + (f"{rewrites:6}" if rewrites else ""))


if __name__ == "__main__":
    main()
