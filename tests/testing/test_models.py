"""The models are those of PyTorch's own tests: same parameter names, shapes, and results."""

import pytest
import torch
from torch.testing._internal.distributed._tensor import common_dtensor as reference

from dtensor.testing import models


def same(ours, theirs, x):
    theirs.load_state_dict(ours.state_dict(), strict=True)
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("options", [{}, {"weight_tying": False, "use_attn_mask": False, "n_layers": 1}])
@pytest.mark.parametrize("checkpoint_activations", [False, True])
def test_transformer(options, checkpoint_activations):
    torch.manual_seed(0)
    options = {"dropout_p": 0.0, "checkpoint_activations": checkpoint_activations, **options}
    ours = models.Transformer(models.ModelArgs(**options))
    same(ours, reference.Transformer(reference.ModelArgs(**options)), torch.randint(8, (2, 16)))
    assert (ours.output.weight is ours.tok_embeddings.weight) == options.get("weight_tying", True)


def test_default_arguments():
    theirs = vars(reference.ModelArgs())
    assert theirs.pop("num_experts") == 0
    assert vars(models.ModelArgs()) == theirs


def test_mlp_and_norm():
    x = torch.randn(3, 10)
    assert torch.equal(models.MLPModule("cpu")(x), reference.MLPModule("cpu")(x))
    assert torch.equal(models.MLPStacked("cpu")(x), reference.MLPStacked("cpu")(x))
    same(models.RMSNorm(10), reference.RMSNormPython(10), x)


def test_arguments_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="multiple of n_heads; got dim=16, n_heads=3"):
        models.Transformer(models.ModelArgs(n_heads=3))
    with pytest.raises(ValueError, match="sequence of 17 tokens exceeds max_seq_len=16"):
        models.Transformer(models.ModelArgs())(torch.zeros(1, 17, dtype=torch.long))
