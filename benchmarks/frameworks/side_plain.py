import torch
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
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

# user
dist.init_process_group("gloo")
model = DistributedDataParallel(build_model())
opt = optimizer(model.parameters())
sampler = DistributedSampler(Text(), shuffle=False)
loader = DataLoader(Text(), MICROBATCH, sampler=sampler, collate_fn=stack)
batches = iter(loader)
for step in range(STEPS):
    total = torch.zeros(())
    for micro in range(ACCUMULATE):
        model.require_backward_grad_sync = micro == ACCUMULATE - 1
        loss = model(**next(batches)).loss / ACCUMULATE
        loss.backward()
        total += loss.detach()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    opt.step()
    opt.zero_grad()
    dist.all_reduce(total, dist.ReduceOp.SUM)
    if dist.get_rank() == 0:
        log(step, total.item() / dist.get_world_size())
# end
if CHECK and dist.get_rank() == 0:
    save(model.state_dict())
dist.barrier()  # a rank that leaves while the other saves may abort
dist.destroy_process_group()
