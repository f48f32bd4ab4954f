#!/usr/bin/env bash
# transformers' GPT2LMHeadModel does not find the type of its own loss, and warns of it in the forward, which breaks graphs.
#
# transformers 5.24.0, torch 2.13.0, CPU. The type is read off the name of the class, of which "LMHeadModel" is none. With
# labels the forward then warns by its logger and takes the loss of causal models. The call of the logger is nothing that
# Dynamo traces: with fullgraph=True it raises Unsupported, otherwise the graph breaks in front of the loss. With
# model.loss_type = "ForCausalLM" the same model is one graph. LlamaForCausalLM, for comparison, knows its type.
# Seen:
#   GPT2LMHeadModel: loss_type None, Unsupported
#   GPT2LMHeadModel, told: loss_type ForCausalLM, one graph
#   LlamaForCausalLM: loss_type ForCausalLM, one graph
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0 numpy
cat > "$dir/run.py" <<'EOF'
import torch
import transformers


def gpt2():
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=16, n_positions=8)
    return transformers.GPT2LMHeadModel(config)


def llama():
    config = transformers.LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=16
    )
    return transformers.LlamaForCausalLM(config)


def tried(name, model):
    tokens = torch.arange(8).view(1, 8)
    torch.compiler.reset()
    try:
        torch.compile(model, backend="eager", fullgraph=True)(input_ids=tokens, labels=tokens, use_cache=False)
        found = "one graph"
    except torch._dynamo.exc.Unsupported:
        found = "Unsupported"
    print(f"{name}: loss_type {model.loss_type}, {found}")


tried("GPT2LMHeadModel", gpt2())
told = gpt2()
told.loss_type = "ForCausalLM"
tried("GPT2LMHeadModel, told", told)
tried("LlamaForCausalLM", llama())
EOF
"$dir/venv/bin/python" "$dir/run.py" 2>/dev/null | tee "$dir/seen"
diff "$dir/seen" <(grep -E '^#   (GPT2|Llama)' "$0" | sed 's/^#   //')
echo "as described"
