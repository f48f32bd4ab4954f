"""accelerate: torchrun --nproc-per-node 2 examples/with_accelerate.py FOLDER EPOCHS; again to go on"""

import torch
from language import arguments, llama, loader

from dtensor import init_device_mesh
from dtensor.interop.accelerate import Accelerator
from dtensor.parallel import fully_shard

folder, epochs = arguments()
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
model = fully_shard(llama(), mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model, optimizer, batches = accelerator.prepare(model, optimizer, loader(8 // mesh.size()))
if start := len(list(folder.glob("epoch-*"))):
    accelerator.load_state(str(folder / f"epoch-{start}"))
for epoch in range(start + 1, epochs + 1):
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(batch, labels=batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.print(f"step {epoch} loss {accelerator.gather(loss).mean():.6f}", flush=True)
    accelerator.save_state(str(folder / f"epoch-{epoch}"))
