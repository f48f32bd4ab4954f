"""TRL's SFTTrainer: torchrun --nproc-per-node 2 examples/with_sft.py FOLDER STEPS; again to go on"""

import trl
from datasets import Dataset
from language import arguments, llama, tokenizer, tokens

from dtensor import distribute_model, init_device_mesh
from dtensor.interop.transformers import Trainer


class SFTTrainer(Trainer, trl.SFTTrainer):
    """Both: what Trainer says of sharded models, and how SFTTrainer trains."""


folder, steps = arguments()
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
model = distribute_model(llama(), mesh, "model", outputs={})
texts = Dataset.from_dict({"text": [" ".join(map(str, x.tolist())) for x in tokens()]})
run = {"per_device_train_batch_size": 8, "max_steps": steps, "save_steps": 2, "eval_steps": 2, "eval_strategy": "steps"}
how = {"learning_rate": 1e-2, "lr_scheduler_type": "constant", "max_length": 16, "logging_steps": 1, "use_cpu": True}
args = trl.SFTConfig(str(folder), **run, **how, bf16=False, report_to="none")
trainer = SFTTrainer(model, args, train_dataset=texts, eval_dataset=texts, processing_class=tokenizer())
trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")))
for line in trainer.state.log_history:
    if "loss" in line:
        print(f"step {line['step']} loss {line['loss']:.6f} norm {line['grad_norm']:.6f}", flush=True)
