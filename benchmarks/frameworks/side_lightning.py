import lightning
from common import (
    ACCUMULATE,
    CHECK,
    MICROBATCH,
    RANKS,
    STEPS,
    Text,
    build_model,
    log,
    optimizer,
    save,
    stack,
)
from torch.utils.data import DataLoader


# user
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model, self.total = build_model(), 0.0

    def training_step(self, batch, index):
        loss = self.model(**batch).loss
        self.total += self.all_gather(loss.detach()).mean().item() / ACCUMULATE
        return loss

    def on_before_optimizer_step(self, optimizer):
        if self.global_rank == 0:
            log(self.global_step, self.total)
        self.total = 0.0

    def configure_optimizers(self):
        return optimizer(self.parameters())


module = Module()
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=RANKS,
    strategy="ddp",
    max_steps=STEPS,
    accumulate_grad_batches=ACCUMULATE,
    gradient_clip_val=1e9,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(module, DataLoader(Text(), MICROBATCH, collate_fn=stack))
# end
if CHECK and trainer.is_global_zero:
    save(module.model.state_dict())
