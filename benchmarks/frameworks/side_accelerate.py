from accelerate import Accelerator
from common import (
    ACCUMULATE,
    CHECK,
    MICROBATCH,
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
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
model = build_model()
loader = DataLoader(Text(), MICROBATCH, collate_fn=stack)
model, opt, loader = accelerator.prepare(model, optimizer(model.parameters()), loader)
batches, total = iter(loader), 0.0
for i in range(STEPS * ACCUMULATE):
    with accelerator.accumulate(model):
        loss = model(**next(batches)).loss
        accelerator.backward(loss)
        total += accelerator.gather(loss.detach()).mean().item() / ACCUMULATE
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1e9)
            if accelerator.is_main_process:
                log(i // ACCUMULATE, total)
            total = 0.0
        opt.step()
        opt.zero_grad()
# end
if CHECK and accelerator.is_main_process:
    save(accelerator.unwrap_model(model).state_dict())
accelerator.end_training()
