"""Time of one eager operator on a DTensor, against torch.distributed.tensor in the same run: `python bench/eager.py`.

One process on a fake process group, so nothing is communicated: what is timed is dispatch. The two are interleaved;
each line gives the medians over the rounds and the median of the ratios with its quartiles.
"""

import statistics
import time
from collections.abc import Callable

import click
import torch
import torch.distributed as dist
from torch.distributed import tensor as theirs
from torch.testing._internal.distributed.fake_pg import FakeStore

import dtensor as ours

CASES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "relu": lambda x, w: torch.relu(x),
    "add": lambda x, w: x + x,
    "mm": lambda x, w: x @ w,
    "sum": lambda x, w: x.sum(),
    "view": lambda x, w: x.view(16, 4, 4),
}
"""Name -> the operator, on a tensor sharded on dimension 0 and a replicated one, both 16×16."""


def microseconds(run: Callable[[], object], calls: int) -> float:
    """Mean time of a call."""
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls * 1e6


@click.command(help=__doc__)
@click.option("--rounds", default=15, show_default=True, help="Interleaved rounds.")
@click.option("--calls", default=2000, show_default=True, help="Calls in a round.")
def main(rounds: int, calls: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    mesh, dense = ours.init_device_mesh("cpu", (2,)), torch.randn(16, 16)
    pairs = [
        tuple(lib.distribute_tensor(dense, mesh, [p]) for p in (lib.Shard(0), lib.Replicate()))
        for lib in (ours, theirs)
    ]
    click.echo(f"torch {torch.__version__}; µs per call, medians of {rounds} rounds of {calls} calls")
    click.echo(f"{'':6}{'dtensor':>9}{'torch':>9}{'ratio':>8}  quartiles")
    for name, case in CASES.items():
        runs = [lambda pair=pair, case=case: case(*pair) for pair in pairs]
        for run in runs:
            microseconds(run, calls)
        times = [[microseconds(run, calls) for run in runs] for _ in range(rounds)]
        low, middle, high = statistics.quantiles([a / b for a, b in times], n=4)
        a, b = (statistics.median(column) for column in zip(*times))
        click.echo(f"{name:6}{a:9.1f}{b:9.1f}{middle:8.2f}  {low:.2f} to {high:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
