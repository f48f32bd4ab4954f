"""transformers' Trainer: torchrun --nproc-per-node 2 examples/with_trainer.py FOLDER STEPS; again to go on"""

from language import arguments, dataset, llama
from transformers import TrainingArguments

from dtensor import init_device_mesh
from dtensor.interop.transformers import Trainer
from dtensor.parallel import fully_shard

folder, steps = arguments()
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
model = fully_shard(llama(), mesh)
batch = {"per_device_train_batch_size": 8 // mesh.size(), "gradient_accumulation_steps": 2}
every = {"logging_steps": 1, "save_steps": 2, "eval_steps": 2, "eval_strategy": "steps"}
schedule = {"max_steps": steps, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "max_grad_norm": 0.5}
args = TrainingArguments(str(folder), **batch, **every, **schedule, use_cpu=True, report_to="none", disable_tqdm=True)
trainer = Trainer(model, args, train_dataset=dataset(), eval_dataset=dataset())
trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")))
for line in trainer.state.log_history:
    if "loss" in line:
        print(f"step {line['step']} loss {line['loss']:.6f} norm {line['grad_norm']:.6f}", flush=True)
