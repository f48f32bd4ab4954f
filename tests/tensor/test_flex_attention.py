"""flex_attention on DTensors, which sees full tensors, and attention with torch's causal biases: as on one device."""

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from dtensor import AgreementError, Replicate, Shard, distribute_tensor, implicit_replication, init_device_mesh
from dtensor.testing import with_ranks

N = 128
DOCUMENTS = torch.arange(N) // 50
TABLE = torch.linspace(0.5, 2, 4)


def masked(function):
    return create_block_mask(function, None, None, N, N, device="cpu")


def causal(b, h, i, j):
    return i >= j


CALLS = {
    "nothing": {},
    "a block mask": {"block_mask": masked(causal)},
    "a mask that captures": {"block_mask": masked(lambda b, h, i, j: DOCUMENTS[i] == DOCUMENTS[j])},
    "a score_mod": {"score_mod": lambda s, b, h, i, j: s + h * 0.1 - (i - j).abs() * 0.01},
    "a score_mod that captures": {"score_mod": lambda s, b, h, i, j: s * TABLE[h], "block_mask": masked(causal)},
    "grouped queries": {"enable_gqa": True, "block_mask": masked(causal)},
}


def compiled(function):
    torch.compiler.reset()
    return torch.compile(function, backend="dtensor", options={"inner": "aot_eager"})


def queries(heads, kv_heads, lengths=(N, N)):
    torch.manual_seed(0)
    return [torch.randn(2, h, n, 8) for h, n in zip((heads, kv_heads, kv_heads), (lengths[0], lengths[1], lengths[1]))]


def check_flex(mesh, names, placements, hows):
    for name in names:
        given = CALLS[name]
        plain = queries(4, 2 if "enable_gqa" in given else 4)

        def attend(q, k, v, given=given):
            return flex_attention(q, k, v, **given)

        wanted = attend(*plain)
        for p in placements:
            for how in hows:
                run = how(attend) if how is not None else attend
                found = run(*[distribute_tensor(x, mesh, [p]) for x in plain]).full_tensor()
                torch.testing.assert_close(found, wanted, msg=lambda m, text=(name, p, how): f"{text}: {m}")


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@with_ranks(2)
def test_flex_attention(rank):
    """Forward only: torch has no backward of it on the CPU."""
    mesh = init_device_mesh("cpu", (2,))
    check_flex(mesh, ["nothing", "a mask that captures", "grouped queries"], [Shard(1)], [None])
    check_flex(mesh, ["a score_mod that captures"], [Shard(1)], [compiled])
    with implicit_replication():
        check_flex(mesh, ["a block mask"], [Shard(1)], [None])


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@with_ranks(2, fresh=True)
def test_what_a_score_mod_captures_is_compared(rank):
    mesh = init_device_mesh("cpu", (2,))
    other = TABLE + rank
    q, k, v = [distribute_tensor(x, mesh, [Shard(1)]) for x in queries(4, 4)]
    said = ""
    try:
        flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s * other[h])
    except AgreementError as error:
        said = str(error)
    # Nobody waits to compare: whoever comes second raises, and the other one when it next communicates.
    everyone = [None, None]
    dist.all_gather_object(everyone, said)
    assert "block_mask, score_mod or what they capture, tensor 4" in "".join(everyone), everyone


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:flex_attention called without")
@with_ranks(2)
def test_flex_attention_in_all_layouts(rank):
    mesh = init_device_mesh("cpu", (2,))
    check_flex(mesh, CALLS, [Shard(0), Shard(1), Shard(2), Replicate()], [None, compiled])


def attended(bias, lengths, xs):
    xs = [x.detach().requires_grad_() for x in xs]
    F.scaled_dot_product_attention(*xs, attn_mask=bias(*lengths)).square().sum().backward()
    return [x.grad for x in xs]


@with_ranks(2)
def test_causal_biases(rank):
    mesh = init_device_mesh("cpu", (2,))
    for bias, lengths in ((causal_lower_right, (4, 8)), (causal_upper_left, (4, 8)), (causal_lower_right, (8, 8))):
        plain = queries(2, 2, lengths)
        wanted = attended(bias, lengths, plain)
        result = F.scaled_dot_product_attention(*plain, attn_mask=bias(*lengths))
        for p in (Shard(0), Shard(1), Shard(2), Replicate()):
            xs = [distribute_tensor(x, mesh, [p]) for x in plain]
            for found, grad in zip(attended(bias, lengths, xs), wanted, strict=True):
                torch.testing.assert_close(found.full_tensor(), grad)
        run = compiled(lambda q, k, v, b=bias, n=lengths: F.scaled_dot_product_attention(q, k, v, attn_mask=b(*n)))
        torch.testing.assert_close(run(*[distribute_tensor(x, mesh, [Shard(1)]) for x in plain]).full_tensor(), result)
