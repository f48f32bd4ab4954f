"""A small Qwen3 on one device, or by hand on two ranks, where gradients are forgotten: docs/guides/comparing.md

python examples/qwen3_by_hand.py; torchrun --nproc-per-node 2 examples/qwen3_by_hand.py
"""

import os

import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM

from dtensor import init_device_mesh
from dtensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from dtensor.parallel.checks.rank_variance import WATCHED

PLAN = {
    "model.layers.*.self_attn.[qkv]_proj": ColwiseParallel(),
    "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    "model.layers.*.mlp.gate_proj": ColwiseParallel(),
    "model.layers.*.mlp.up_proj": ColwiseParallel(),
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
}

torch.manual_seed(0)
config = Qwen3Config(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=32,
)
model = Qwen3ForCausalLM(config)
if "RANK" in os.environ:
    parallelize_module(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), PLAN)
    for p in model.parameters():  # without the check that would refuse these gradients
        vars(p).pop(WATCHED, None)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(2):
    tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(step))
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} loss {loss.item():.6f}", flush=True)
if dist.is_initialized():
    dist.destroy_process_group()
