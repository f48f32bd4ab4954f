"""Folders of pretrained models: written from shards, read by transformers bit for bit, read again part by part."""

import copy
import json

import pytest
import torch
import torch.distributed as dist

import dtensor
from dtensor import CheckpointError, DTensor, PlacementError, Shard, distribute_model, init_device_mesh
from dtensor.parallel import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module
from dtensor.testing import with_ranks
from tests.state.memory import peak_of

transformers = pytest.importorskip("transformers", reason="not installed; write: pip install transformers")
TOKENS = torch.arange(20).view(2, 10)
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 32,
}
STYLES = {
    "model.layers.*.mlp.gate_proj": ColwiseParallel(),
    "model.layers.*.mlp.up_proj": ColwiseParallel(),
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
}
DOORS = {
    "model": lambda model, mesh: distribute_model(model, mesh["tp"], "model", outputs={}),
    "fsdp": lambda model, mesh: fully_shard(model, mesh["dp"]),
    "both": lambda model, mesh: fully_shard(
        distribute_model(model, mesh["tp"], {"*_proj.weight": {"tp": Shard(0)}}, outputs={}), mesh["dp"]
    ),
    "styles": lambda model, mesh: parallelize_module(model, mesh["tp"], STYLES),
    "styles and fsdp": lambda model, mesh: fully_shard(parallelize_module(model, mesh["tp"], STYLES), mesh["dp"]),
}


def llama(tied=False, dtype=torch.float32):
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=tied)).to(dtype)


def experts():
    torch.manual_seed(0)
    more = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES, **more))


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        assert found[name].dtype == x.dtype, name
        assert torch.equal(whole(found[name]), x), name


def assert_read(folder, plain):
    """transformers reads the folder as `plain`, bit for bit."""
    if dist.get_rank() == 0:
        assert_same(type(plain).from_pretrained(folder).state_dict(), plain.state_dict())
        assert json.loads((folder / "config.json").read_text())["architectures"] == [type(plain).__name__]


def assert_read_by_parts(path, plain, door, shard):
    """The folder is read onto this job's ranks, sharded by `shard`: each holds little more than its parts meanwhile."""
    models = []
    peak = peak_of(lambda: models.append(shard(dtensor.from_pretrained(transformers.AutoModelForCausalLM, path))))
    (model,) = models
    tensors = {id(x): x for x in (*model.parameters(), *model.buffers())}.values()
    parts = sum((x.to_local() if isinstance(x, DTensor) else x).nbytes for x in tensors)
    if dist.get_rank() == 0:
        ratio = f"ratio {peak / parts:.2f}"
        print(f"{path.name} {door}, {dist.get_world_size()} ranks: peak {peak} bytes, parts {parts}, {ratio}")
    assert peak <= 1.2 * parts, (door, peak, parts)
    assert_same(model.state_dict(), plain.state_dict())
    found = model(input_ids=TOKENS, labels=TOKENS).loss
    torch.testing.assert_close(found, plain(input_ids=TOKENS, labels=TOKENS).loss, rtol=1e-4, atol=0)
    found.backward()


@pytest.mark.nightly
@with_ranks(4)
def test_saved_from_two_by_two_and_read_by_transformers(rank, tmp_path):
    save_from(tmp_path, "both")
    four = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    assert_read_by_parts(tmp_path / "both", llama(tied=True), "fsdp", lambda model: fully_shard(model, four))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain, path = experts(), tmp_path / "experts"
    model = distribute_model(copy.deepcopy(plain), mesh["tp"], {"*experts.down_proj": {"tp": Shard(0)}})
    peak = peak_of(lambda: model.save_pretrained(path))
    assert peak < 0.4 * sum(p.nbytes for p in plain.parameters()), peak
    assert_read(path, plain)
    with pytest.raises(ValueError if rank == 0 else CheckpointError, match="Could not parse the size value"):
        model.save_pretrained(path, max_shard_size="manyGB")
    with pytest.raises(CheckpointError, match=r"write dtensor\.Checkpoints"):
        model.save_pretrained(path, distributed_checkpoint=True)


@pytest.mark.nightly
@with_ranks(4)
def test_saved_from_all_doors(rank, tmp_path):
    save_from(tmp_path, *DOORS)


def save_from(tmp_path, *doors):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for door, shard in [(door, DOORS[door]) for door in doors]:
        plain = llama(tied=door in ("both", "styles"), dtype=torch.bfloat16 if door == "fsdp" else torch.float32)
        model = shard(copy.deepcopy(plain), mesh)
        model.save_pretrained(tmp_path / door, max_shard_size="20kB")
        assert len(list((tmp_path / door).glob("model-*.safetensors"))) > 1
        assert_read(tmp_path / door, plain)
        copy.deepcopy(model).save_pretrained(tmp_path / f"{door} copied")
        assert_read(tmp_path / f"{door} copied", plain)


@with_ranks(2)
def test_read_part_by_part(rank, tmp_path):
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    doors = {
        "model": lambda model: distribute_model(model, mesh["tp"], {"*_proj*": {"tp": Shard(0)}}, outputs={}),
        "fsdp": lambda model: fully_shard(model, mesh["tp"]),
        "styles": lambda model: parallelize_module(model, mesh["tp"], STYLES),
    }
    for made in (lambda: llama(tied=True, dtype=torch.bfloat16), experts):
        plain, path = made(), tmp_path / made().config.model_type
        if rank == 0:
            plain.save_pretrained(path, max_shard_size="40kB")
        dist.barrier()
        for door, shard in doors.items():
            if door == "styles" and plain.config.model_type != "llama":
                continue
            assert_read_by_parts(path, plain, door, shard)


@with_ranks(2)
def test_adapters(rank, tmp_path):
    peft = pytest.importorskip("peft", reason="not installed; write: pip install peft")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    columns, rows = {"tp": Shard(0)}, {"tp": Shard(1)}
    plan = {"*q_proj.base_layer.weight": columns, "*q_proj.lora_B.*": columns}
    plan |= {"*o_proj.base_layer.weight": rows, "*o_proj.lora_A.*": rows}
    base, given = tmp_path / "base", tmp_path / "given"
    plain = peft.get_peft_model(llama(), lora)
    if rank == 0:
        llama().save_pretrained(base)
        plain.save_pretrained(given)
    dist.barrier()
    plain(input_ids=TOKENS, labels=TOKENS).loss.backward()

    def assert_trains(model):
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        for (name, p), wanted in zip(model.named_parameters(), plain.parameters()):
            if wanted.grad is not None:
                torch.testing.assert_close(whole(p.grad), wanted.grad, msg=name)

    doors = {
        "model": lambda model: distribute_model(model, mesh, plan, outputs={}),
        "fsdp": lambda model: fully_shard(model, mesh),
    }
    for door, shard in doors.items():
        model = shard(copy.deepcopy(plain))
        assert_trains(model)
        model.save_pretrained(tmp_path / door)
        if rank == 0:
            read = peft.PeftModel.from_pretrained(llama(), tmp_path / door)
            assert_same(read.state_dict(), plain.state_dict())
        values = peft.get_peft_model_state_dict(copy.deepcopy(plain))
        for p in model.parameters():
            p.detach().zero_() if p.requires_grad else None
        peft.set_peft_model_state_dict(model, values)
        assert_same(model.state_dict(), plain.state_dict())
        later = dtensor.from_pretrained(transformers.AutoModelForCausalLM, base)
        model = shard(peft.PeftModel.from_pretrained(later, given, is_trainable=True))
        assert_same(model.state_dict(), plain.state_dict())
        assert_trains(model)
    model = distribute_model(llama(), mesh, "model", outputs={})
    assert_trains(peft.PeftModel.from_pretrained(model, given, is_trainable=True))
    merged = distribute_model(copy.deepcopy(plain), mesh, plan).merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    if rank == 0:
        read = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "merged")
        torch.testing.assert_close(read(TOKENS).logits, plain(TOKENS).logits)
    model = dtensor.from_pretrained(transformers.AutoModelForCausalLM, base, dtype=torch.bfloat16)
    assert_same(fully_shard(model, mesh).state_dict(), llama(dtype=torch.bfloat16).state_dict())
    model.save_pretrained(tmp_path / "positional", True, model.state_dict())
    assert_read(tmp_path / "positional", llama(dtype=torch.bfloat16))
    model = dtensor.from_pretrained(transformers.LlamaForCausalLM, base)
    model.register_buffer("table", torch.empty(3, device="meta"))
    with pytest.raises(PlacementError, match=r"'table' of a LlamaForCausalLM: no file holds it.*give it values before"):
        distribute_model(model, mesh, {})
    with pytest.raises(TypeError, match="takes a class of transformers"):
        dtensor.from_pretrained(torch.nn.Linear, tmp_path)
