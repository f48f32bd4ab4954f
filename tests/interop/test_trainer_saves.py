"""What Trainer writes of a sharded model: the folder of one device, with no whole state dict on a rank."""

import importlib.util

import pytest
import torch
import torch.distributed as dist

from dtensor import init_device_mesh
from dtensor.parallel import fully_shard
from dtensor.testing import run_ranks


def llama():
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=4))


def saved(rank, folder):
    import transformers

    import dtensor.interop.transformers as ours

    def whole(_):
        raise AssertionError("no rank holds all of it")

    before, ours.whole_weights = ours.whole_weights, whole
    try:
        model = fully_shard(llama(), init_device_mesh("cpu", (2,)))
        args = transformers.TrainingArguments(folder, use_cpu=True, report_to="none", disable_tqdm=True)
        ours.Trainer(model, args).save_model()
        dist.barrier()
    finally:
        ours.whole_weights = before


@pytest.mark.skipif(not importlib.util.find_spec("accelerate"), reason="needs transformers and accelerate")
def test_a_sharded_model_is_saved_part_by_part(tmp_path):
    import transformers

    run_ranks(saved, 2, str(tmp_path), timeout=240.0)
    read = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    want = llama().state_dict()
    assert read.state_dict().keys() == want.keys()
    assert all(torch.equal(x, want[name]) for name, x in read.state_dict().items())
