"""Training over a slow wire, against torch.distributed.tensor in the same run: `python bench/slow_link.py`.

Needs Linux, root, and iproute2 (`ip`, `tc`). Two network namespaces are joined by a veth pair of which each side sends
at most 1 Gbit/s (`tc qdisc … tbf`), with one rank in each (gloo, one thread). Namespaces and pair carry this process's
id, and are removed at the end, however it ends, short of a kill that cannot be caught.

Both sides train `dtensor.testing.Transformer` from the same weights on the same batches by the same plans, in blocks of
steps that alternate. A step is forward and cross entropy, compiled as one graph, backward, and SGD. Both use the math
path of attention, as torch has no rule for the one that CPUs take by default; the plain causal mask that this path
makes stops torch's too, so that its calls run under `implicit_replication`. Ours is compiled with backend="dtensor",
torch's with Inductor and the switches of `SWITCHES`.

Times are of rank 0, collectives those that a profiler sees in a step, bytes what the kernel counts that rank 0's end of
the pair sent, headers included.
"""

import contextlib
import faulthandler
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as their_styles
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.attention import SDPBackend, sdpa_kernel

from dtensor import init_device_mesh
from dtensor import parallel as our_styles
from dtensor.testing import ModelArgs, Transformer

VOCAB, HEADS, RATE = 256, 4, 0.1
"""Values of a token, attention heads, learning rate."""

REORDER = "reorder_communication_preserving_peak_memory"
SWITCHES: dict[str, Any] = {
    "bucket_all_gathers_fx": "all",
    "bucket_reduce_scatters_fx": "all",
    "bucket_all_reduces_fx": "all",
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": [REORDER, "sink_waits_iterative", REORDER],
}
"""Inductor's options on communication that run on CPU, the passes being those its source recommends.

Left out: `aten_distributed_optimizations.enable_overlap_scheduling`, which fails without triton, and
`_micro_pipeline_tp`, which rewrites only for groups with symmetric memory, that is on GPUs.
"""

WARM_UP = 3
"""Steps of each side before the first block; the first compiles."""

NOT_SENT = ("wait_tensor", "_wrap_tensor_autograd")
"""Operators beside the functional collectives that communicate nothing."""

SIDES = ("dtensor", "torch")
PLANS = ("tp", "sp")
ADDRESSES = ("10.213.7.1", "10.213.7.2")
STACKS_SIGNAL, GRACE = signal.SIGUSR1, 2.0
"""What has a rank print its stacks, and the seconds it is given for that."""


@dataclass(frozen=True)
class Options:
    """What is trained: the plan, sizes of model and batch; how many blocks of each side, of how many steps."""

    plan: str
    layers: int
    dim: int
    seq: int
    batch: int
    rounds: int
    steps: int
    timeout: float


@dataclass
class Side:
    """One side: the seconds of a step in each block, bytes sent in a step, collectives of a step, all losses."""

    seconds: list[float]
    bytes: float
    collectives: dict[str, int]
    losses: list[float]


def command(*words: object) -> None:
    """Run a program to its end; what it complains of is the error."""
    done = subprocess.run([str(w) for w in words], capture_output=True, text=True)
    if done.returncode:
        raise click.ClickException(f"{' '.join(map(str, words))}: {done.stderr.strip() or done.returncode}")


@contextlib.contextmanager
def slow_link(rate: str) -> Iterator[list[tuple[str, str]]]:
    """Context with two namespaces that reach each other at `rate`: the name and the interface of each."""
    ends = [(f"dtensor-{os.getpid()}-{i}", f"dt{os.getpid()}-{i}") for i in range(2)]
    with contextlib.ExitStack() as made:
        for name, _ in ends:
            command("ip", "netns", "add", name)
            made.callback(command, "ip", "netns", "delete", name)  # the pair goes with them
        (name, end), (other_name, other_end) = ends
        command("ip", "link", "add", end, "netns", name, "type", "veth", "peer", "name", other_end, "netns", other_name)
        for (name, end), address in zip(ends, ADDRESSES):
            command("ip", "-n", name, "address", "add", f"{address}/30", "dev", end)
            for device in ("lo", end):
                command("ip", "-n", name, "link", "set", device, "up")
            tbf = ("tbf", "rate", rate, "burst", "128kb", "latency", "50ms")
            command("tc", "-n", name, "qdisc", "add", "dev", end, "root", *tbf)
        yield ends


def run_ranks(ends: list[tuple[str, str]], options: Options) -> list[dict[str, Side]]:
    """Run `on_rank` in each namespace; what each rank found of each side.

    Raises:
        click.ClickException: a rank failed, or time was up; with what it printed, and its stacks.
    """
    ranks: list[subprocess.Popen] = []
    with tempfile.TemporaryDirectory(prefix="dtensor-slow-link-") as folder:
        logs = [Path(folder) / f"log-{rank}" for rank in range(2)]
        results = [Path(folder) / f"result-{rank}" for rank in range(2)]
        try:
            for rank, (name, end) in enumerate(ends):
                job = json.dumps({"rank": rank, "end": end, "result": str(results[rank]), "options": asdict(options)})
                words = ["ip", "netns", "exec", name, sys.executable, __file__, "--job", job]
                with logs[rank].open("w") as log:
                    ranks.append(subprocess.Popen(words, stdout=log, stderr=log, env=_environment(end)))
            _wait(ranks, logs, time.monotonic() + options.timeout)
            return [{side: Side(**found) for side, found in json.loads(r.read_text()).items()} for r in results]
        finally:
            for process in ranks:
                process.kill()
                process.wait()


def _environment(end: str) -> dict[str, str]:
    own = {"GLOO_SOCKET_IFNAME": end, "TP_SOCKET_IFNAME": end, "OMP_NUM_THREADS": "1", "DTENSOR_LINKS": ""}
    return {**os.environ, **own}


def _wait(ranks: list[subprocess.Popen], logs: list[Path], deadline: float) -> None:
    while any(r.poll() is None for r in ranks):
        if time.monotonic() > deadline or any(r.poll() for r in ranks):
            break
        time.sleep(0.2)
    if all(r.returncode == 0 for r in ranks):
        return
    how = ["was not done in time" if r.poll() is None else f"ended with {r.returncode}" for r in ranks]
    for r in ranks:
        if r.poll() is None:
            r.send_signal(STACKS_SIGNAL)  # ends one that is not yet far enough to print its stacks
    time.sleep(GRACE)
    said = [f"rank {i} {how[i]}:\n{log.read_text()[-6000:]}" for i, log in enumerate(logs)]
    raise click.ClickException("\n".join(said))


def on_rank(rank: int, end: str, options: Options) -> dict[str, Side]:
    """One rank's part: both sides, block by block."""
    mesh = init_device_mesh("cpu", (2,))
    batches = [_batch(options, i) for i in range(WARM_UP + options.rounds * options.steps)]
    trainers = {side: Trainer(side, mesh, options) for side in SIDES}
    found = {side: Side([], 0.0, {}, [t.step(*b) for b in batches[:WARM_UP]]) for side, t in trainers.items()}
    sent = {side: [] for side in SIDES}
    for i in range(options.rounds):
        block = batches[WARM_UP + i * options.steps :][: options.steps]
        for side in SIDES if i % 2 else reversed(SIDES):
            dist.barrier()
            before, start = _sent(end), time.perf_counter()
            found[side].losses += [trainers[side].step(*batch) for batch in block]
            found[side].seconds.append((time.perf_counter() - start) / len(block))
            sent[side].append((_sent(end) - before) / len(block))
    for side, trainer in trainers.items():
        found[side].bytes = statistics.median(sent[side])
        found[side].collectives = trainer.collectives(batches[0])
    return found


class Trainer:
    """A model of one side, its compiled loss, and its optimizer."""

    def __init__(self, side: str, mesh: Any, options: Options):
        torch.manual_seed(0)
        args = ModelArgs(options.layers, VOCAB, options.seq, options.dim, HEADS, dropout_p=0.0, weight_tying=False)
        styles: Any = our_styles if side == "dtensor" else their_styles
        self.model = styles.parallelize_module(Transformer(args), mesh, plan(styles, options.plan == "sp"))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)
        how: dict[str, Any] = {"backend": "dtensor"} if side == "dtensor" else {"options": SWITCHES}
        self.loss = torch.compile(self._loss, fullgraph=True, **how)
        self.around = contextlib.nullcontext if side == "dtensor" else implicit_replication

    def _loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        """Train on one batch; the loss before."""
        self.optimizer.zero_grad()
        with self.around(), sdpa_kernel(SDPBackend.MATH):
            loss = self.loss(inputs, targets)
            loss.backward()
        self.optimizer.step()
        return loss.item()

    def collectives(self, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, int]:
        """The collectives of one more step, by operator."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            self.step(*batch)
        names = Counter(e.name.removeprefix("_c10d_functional::") for e in seen.events() or () if "_c10d_f" in e.name)
        return {name.removesuffix("_"): n for name, n in sorted(names.items()) if name not in NOT_SENT}


def plan(styles: Any, sequence: bool) -> dict[str, Any]:
    """The plan of `Transformer.parallelize`, in the classes of either library."""
    col, row, norm = styles.ColwiseParallel, styles.RowwiseParallel, styles.SequenceParallel
    if not sequence:
        return {
            "tok_embeddings": row(input_layouts=Replicate()),
            "pos_embeddings": row(input_layouts=Replicate()),
            "layers.*.attention.w[qkv]": col(use_local_output=False),
            "layers.*.attention.wo": row(),
            "layers.*.feed_forward.w1": col(),
            "layers.*.feed_forward.w2": row(),
            "output": col(output_layouts=Replicate()),
        }
    return {
        "tok_embeddings": row(input_layouts=Replicate(), output_layouts=Shard(1)),
        "pos_embeddings": row(input_layouts=Replicate(), output_layouts=Shard(0)),
        "layers.*.attention_norm": norm(),
        "layers.*.attention": styles.PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "layers.*.attention.w[qkv]": col(use_local_output=False),
        "layers.*.attention.wo": row(output_layouts=Shard(1)),
        "layers.*.ffn_norm": norm(),
        "layers.*.feed_forward.w1": col(input_layouts=Shard(1)),
        "layers.*.feed_forward.w2": row(output_layouts=Shard(1)),
        "norm": norm(),
        "output": col(input_layouts=Shard(1), output_layouts=Replicate()),
    }


def _batch(options: Options, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(VOCAB, (options.batch, options.seq + 1), generator=torch.Generator().manual_seed(index))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _sent(end: str) -> int:
    return int(Path(f"/sys/class/net/{end}/statistics/tx_bytes").read_text())


def be_rank(rank: int, end: str, result: str, options: dict[str, Any]) -> None:
    """What runs in a namespace: `on_rank`, and its result into a file."""
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    torch.set_num_threads(1)
    given = Options(**options)
    where, limit = f"tcp://{ADDRESSES[0]}:29500", timedelta(seconds=given.timeout)
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2, timeout=limit)
    found = on_rank(rank, end, given)
    Path(result).write_text(json.dumps({side: asdict(seen) for side, seen in found.items()}))
    dist.barrier()
    dist.destroy_process_group()


def report(options: Options, ranks: list[dict[str, Side]]) -> str:
    """The figures of one plan."""
    sides = ranks[0]
    low, middle, high = statistics.quantiles([a / b for a, b in zip(*(sides[s].seconds for s in SIDES))], n=4)
    lines = [f"plan {options.plan}: medians of {options.rounds} interleaved blocks of {options.steps} steps"]
    for name, side in sides.items():
        counted = ", ".join(f"{n} {op}" for op, n in side.collectives.items())
        quartiles = statistics.quantiles([1e3 * s for s in side.seconds], n=4)
        spread = f"({quartiles[0]:.0f} to {quartiles[2]:.0f})"
        lines.append(f"  {name:8} {quartiles[1]:7.0f} ms a step {spread:14} {side.bytes / 1e6:6.2f} MB sent; {counted}")
    lines.append(f"  time, dtensor / torch: {middle:.2f}, quartiles {low:.2f} to {high:.2f}")
    curves = [rank[side].losses for rank in ranks for side in SIDES]
    apart = max(max(at) - min(at) for at in zip(*curves))
    lines.append(f"  losses from {curves[0][0]:.4f} to {curves[0][-1]:.4f}, at most {apart:.1e} apart")
    return "\n".join(lines)


@click.command(help=__doc__)
@click.option(
    "--plan", "plans", type=click.Choice(("tp", "sp")), multiple=True, default=("tp", "sp"), show_default=True
)
@click.option("--layers", default=2, show_default=True, help="Layers of the model.")
@click.option("--dim", default=256, show_default=True, help="Width of the model.")
@click.option("--seq", default=128, show_default=True, help="Tokens in a sequence.")
@click.option("--batch", default=8, show_default=True, help="Sequences in a batch.")
@click.option("--rounds", type=click.IntRange(min=2), default=11, show_default=True, help="Blocks of each side.")
@click.option("--steps", default=3, show_default=True, help="Steps in a block.")
@click.option("--rate", default="1gbit", show_default=True, help="Of each side of the wire, as tc writes it.")
@click.option("--timeout", default=600.0, show_default=True, help="Seconds for each plan.")
@click.option("--job", hidden=True)
def main(plans: tuple[str, ...], rate: str, job: str | None, **sizes: Any) -> None:
    if job is not None:
        be_rank(**json.loads(job))
        return
    if os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        raise click.UsageError("network namespaces take root and iproute2 (ip, tc); run it as root, where both are")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that namespaces are removed
    click.echo(
        f"torch {torch.__version__}; two ranks, a wire of {rate}; Transformer of {sizes['layers']} layers, width "
        f"{sizes['dim']}, {sizes['batch']} × {sizes['seq']} tokens, float32; bytes of rank 0"
    )
    for name in plans:
        options = Options(name, **sizes)
        with slow_link(rate) as ends:
            ranks = run_ranks(ends, options)
        click.echo(report(options, ranks))


if __name__ == "__main__":
    main()
