import os

import deepspeed
import torch.distributed as dist
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
from torch.utils.data import DataLoader, DistributedSampler

STAGE = int(os.environ["ZERO"])
# user
deepspeed.init_distributed("gloo")
model = build_model()
config = {
    "train_micro_batch_size_per_gpu": MICROBATCH,
    "gradient_accumulation_steps": ACCUMULATE,
    "gradient_clipping": 1e9,
    "zero_optimization": {"stage": STAGE},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
engine, _, _, _ = deepspeed.initialize(
    model=model, optimizer=optimizer(model.parameters()), config=config
)
sampler = DistributedSampler(Text(), shuffle=False)
batches = iter(DataLoader(Text(), MICROBATCH, sampler=sampler, collate_fn=stack))
total = 0.0
for i in range(STEPS * ACCUMULATE):
    loss = engine(**next(batches)).loss
    mean = loss.detach().clone()
    engine.backward(loss)
    dist.all_reduce(mean)
    total += mean.item() / dist.get_world_size() / ACCUMULATE
    last = engine.is_gradient_accumulation_boundary()
    engine.step()
    if last and dist.get_rank() == 0:
        log(i // ACCUMULATE, total)
    total *= not last
# end
if CHECK:
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=STAGE == 3):
        if dist.get_rank() == 0:
            save({name: p.detach().clone() for name, p in model.named_parameters()})
dist.destroy_process_group()
