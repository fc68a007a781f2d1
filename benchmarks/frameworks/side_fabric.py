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
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

# user
fabric = Fabric(accelerator="cpu", devices=RANKS, strategy="ddp")
fabric.launch()
model = build_model()
model, opt = fabric.setup(model, optimizer(model.parameters()))
loader = fabric.setup_dataloaders(DataLoader(Text(), MICROBATCH, collate_fn=stack))
batches = iter(loader)
for step in range(STEPS):
    total = 0.0
    for micro in range(ACCUMULATE):
        with fabric.no_backward_sync(model, enabled=micro < ACCUMULATE - 1):
            loss = model(**next(batches)).loss / ACCUMULATE
            fabric.backward(loss)
        total += fabric.all_reduce(loss.detach(), reduce_op="mean").item()
    fabric.clip_gradients(model, opt, max_norm=1e9)
    opt.step()
    opt.zero_grad()
    if fabric.is_global_zero:
        log(step, total)
# end
if CHECK and fabric.is_global_zero:
    save(model.module.state_dict())
fabric.barrier()
