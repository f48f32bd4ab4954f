"""What the examples with trainers train: a small Llama, and texts of numbers with a tokenizer that knows them."""

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB, SEQ, TEXTS = 64, 16, 64


def arguments() -> tuple[Path, int]:
    """The folder and the number of steps or epochs that a script was started with."""
    return Path(sys.argv[1]), int(sys.argv[2])


def llama() -> LlamaForCausalLM:
    """A model of 20,000 parameters, the same whoever asks."""
    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, max_position_embeddings=SEQ, eos_token_id=1, **sizes))


def tokens() -> torch.Tensor:
    """Texts (TEXTS, SEQ), in each of which numbers go on by one step."""
    first, step = torch.randint(2, VOCAB, (2, TEXTS, 1), generator=torch.Generator().manual_seed(0))
    return 2 + (first + step * torch.arange(SEQ)) % (VOCAB - 2)


def dataset() -> Any:
    """The texts as examples for a language model."""
    return [{"input_ids": x, "labels": x} for x in tokens()]


def loader(batch: int) -> torch.utils.data.DataLoader:
    """Batches (batch, SEQ) of the texts, in order."""
    return torch.utils.data.DataLoader(tokens(), batch_size=batch)  # pyright: ignore


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of numbers, made here so that nothing is downloaded."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<eos>": 1, **{str(i): i for i in range(2, VOCAB)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")
