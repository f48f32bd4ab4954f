"""Lightning: torchrun --nproc-per-node 2 examples/with_lightning.py FOLDER EPOCHS; again to go on"""

import lightning.pytorch as pl
import torch
from language import arguments, llama, loader

from dtensor import init_device_mesh
from dtensor.interop.lightning import ShardedStrategy
from dtensor.parallel import fully_shard


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = fully_shard(llama(), mesh)

    def training_step(self, batch):
        loss = self.model(batch, labels=batch).loss
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self):
        self.print(f"step {self.current_epoch + 1} loss {self.trainer.callback_metrics['loss']:.6f}", flush=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


folder, epochs = arguments()
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
run = {"max_epochs": epochs, "accumulate_grad_batches": 8, "gradient_clip_val": 0.5, "default_root_dir": folder}
trainer = pl.Trainer(strategy=ShardedStrategy(), accelerator="cpu", devices=mesh.size(), **run)
last = folder / "last.ckpt"
trainer.fit(Module(), loader(8 // mesh.size()), ckpt_path=last if last.exists() else None)
trainer.save_checkpoint(last)
