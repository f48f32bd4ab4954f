#!/usr/bin/env bash
# A mixture of experts of transformers that is asked for its router's logits is one graph only after an eager forward.
#
# transformers 5.24.0, torch 2.13.0, CPU. output_router_logits=True, which the loss that balances experts needs, has the
# logits taken by hooks. The first forward that asks for them installs the hooks, once for the model, under a lock, which
# Dynamo does not trace: with fullgraph=True that forward raises Unsupported, otherwise the graph breaks there. After one
# eager forward the same model is one graph. Without the logits it is one at once.
# Seen:
#   without router logits: one graph
#   with router logits: Unsupported
#   with router logits, after an eager forward: one graph
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0 numpy
cat > "$dir/run.py" <<'EOP'
import torch
import transformers

SIZES = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "use_cache": False}
TOKENS = torch.arange(16).view(2, 8)


def mixtral(logits):
    config = transformers.MixtralConfig(
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=4, output_router_logits=logits, **SIZES
    )
    return transformers.MixtralForCausalLM(config)


def tried(name, model):
    torch.compiler.reset()
    try:
        torch.compile(model, backend="eager", fullgraph=True)(input_ids=TOKENS, labels=TOKENS)
        found = "one graph"
    except torch._dynamo.exc.Unsupported:
        found = "Unsupported"
    print(f"{name}: {found}")


tried("without router logits", mixtral(False))
tried("with router logits", mixtral(True))
model = mixtral(True)
model(input_ids=TOKENS, labels=TOKENS)
tried("with router logits, after an eager forward", model)
EOP
"$dir/venv/bin/python" "$dir/run.py" 2>/dev/null | tee "$dir/seen"
diff "$dir/seen" <(grep -E '^#   (with|without) ' "$0" | sed 's/^#   //')
echo "as described"
