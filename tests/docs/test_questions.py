"""Questions of newcomers, in their words, lead to the section that answers them: by a small search
of the pages here, and by the search of the site in a real Chromium."""

from __future__ import annotations

import functools
import math
import re
import threading
from collections import Counter
from dataclasses import dataclass
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.docs.scripts import ROOT, load_script
from tests.report.folders import browser

stage = load_script("stage_pages")
DOCS = ROOT / "docs"
FIRST = 3  # hits that a newcomer looks at
FAQ = "troubleshooting"


@dataclass(frozen=True)
class Question:
    """What somebody types; the page and the English anchor of the section that answers it ("" is
    what stands above its first section); a phrase of the answer."""

    text: str
    page: str
    anchor: str
    phrase: str

    @property
    def chinese(self) -> bool:
        return re.search(r"[\u4e00-\u9fff]", self.text + self.phrase) is not None


QUESTIONS = [
    Question(*row)
    for row in [
        ("why is my DDP loss not the one-GPU loss", FAQ, "why-is-my-ddp-loss",
         "prints the mean of its own samples alone"),
        ("why is my DDP loss different from single GPU", "systems/ddp", "why-is-my-ddp-loss",
         "each rank takes the mean over its own tokens"),
        ("how much memory does Adam take under ZeRO-2 on 8 ranks", FAQ, "how-much-memory-does-adam",
         "8 GB of that is Adam"),
        ("how much memory does a 7B model need", FAQ, "how-much-memory-does-a-7b",
         "7 billion take 126 GB"),
        ("difference between ZeRO stages", FAQ, "what-is-the-difference-between-ddp",
         "| `fsdpN+zero2` | 4 + 12/N | 2 + 16/N |"),
        ("difference between tensor parallel and pipeline parallel", FAQ, "tensor-parallel-tp-or",
         "a part of every layer"),
        ("NCCL watchdog timeout", FAQ, "my-run-hangs", "not the one that reports"),
        ("how long will training take", FAQ, "how-long-will-training", "186,000 s, or 52 hours"),
        ("what does training cost", FAQ, "how-long-will-training", "413 GPU-hours"),
        ("two GPUs are not twice as fast", FAQ, "why-are-two-gpus", "both wait for the sum"),
        ("TensorBoard or Weights & Biases", FAQ, "how-do-i-watch", "where metrics go besides"),
        ("what is a bubble and how do I shrink it", FAQ, "what-is-a-bubble",
         "(p - 1) / (m + p - 1)"),
        ("what is all-reduce", FAQ, "what-is-an-all-reduce", "each rank has the sum"),
        ("difference between all-gather and reduce-scatter", FAQ, "what-is-an-all-reduce",
         "its own shard of the sum"),
        ("what is a microbatch", FAQ, "what-is-a-microbatch",
         "what one rank runs forward and backward at once"),
        ("which layout for 8B on 8 A100", FAQ, "which-layout-for-8b", "it is `fsdp8+zero2`"),
        ("how do I use gradient accumulation with DDP no_sync", FAQ, "how-do-i-use-gradient",
         "`train.accumulate` cuts the batch"),
        ("no_sync", "systems/ddp", "no_sync-accumulation", "weft reduces on the last one by"),
        ("why is GPU memory still high under FSDP", FAQ, "why-is-gpu-memory-still",
         "does not shard activations"),
        ("FSDP uses as much memory as DDP", FAQ, "why-is-gpu-memory-still",
         "does not shard activations"),
        ("CUDA out of memory", FAQ, "cuda-out-of-memory", "See what fills it"),
        ("NCCL timeout", FAQ, "my-run-hangs", "the rank that is in no collective"),
        ("my training hangs", FAQ, "my-run-hangs", "the rank that is in no collective"),
        ("how do I resume on another number of GPUs", FAQ, "can-i-resume", "name another layout"),
        ("batch size and learning rate with more GPUs", FAQ, "do-i-change-the-batch",
         "the batch of all ranks together"),
        ("find_unused_parameters", FAQ, "expected-to-have-finished", "no rank has used gets none"),
        ("Expected to have finished reduction in the prior iteration", FAQ,
         "expected-to-have-finished", "no rank has used gets none"),
        ("BatchNorm under DDP SyncBatchNorm", FAQ, "do-i-need-syncbatchnorm",
         "statistics over the whole batch"),
        ("LoRA with FSDP", FAQ, "how-do-i-train-with-lora", "Only the adapter"),
        ("when to use tensor parallel or pipeline parallel", FAQ, "tensor-parallel-tp-or",
         "belongs inside a node"),
        ("loss spikes with bf16", FAQ, "my-loss-spikes", '`precision.compute = "fp32"`'),
        ("sampler.set_epoch", "systems/ddp", "batch-norm-sampler-epochs",
         "without that call all epochs have one order"),
        ("do I need DistributedSampler", FAQ, "do-i-need-a-distributedsampler",
         "follows from `train.seed` and the step alone"),
        ("training hangs at the end of an epoch with uneven inputs", FAQ,
         "does-training-hang-at-the-end", "same number of steps"),
        ("how to export to Hugging Face", FAQ, "how-do-i-export", "that `from_pretrained` loads"),
        ("how much faster will 2 nodes be", FAQ, "how-much-faster", "Strong scaling keeps the"),
        ("what is a device mesh", FAQ, "what-is-a-device-mesh", "arranges them along the axes"),
        ("what are rank and world size", FAQ, "what-is-a-device-mesh", "the number of ranks"),
        ("difference between DDP and FSDP", FAQ, "what-is-the-difference-between-ddp",
         "holds the whole state on each rank"),
        ("what is MFU", FAQ, "what-are-mfu", "the share of the devices' peak"),
        ("gradient clipping with FSDP or tensor parallel", FAQ, "does-gradient-clipping",
         "the norm of all gradients of the whole model"),
        ("activation checkpointing", FAQ, "how-do-i-turn-on", "keeps the input of each block"),
        ("save checkpoint only on rank 0", FAQ, "do-i-print", "by all ranks together"),
        ("DataLoader num_workers", FAQ, "is-data-loading-slow", "`data.workers`"),
        ("do I need NVLink or InfiniBand", FAQ, "do-i-need-nvlink", "`tp` needs NVLink"),
        ("why are two GPUs slower than one", FAQ, "why-are-two-gpus", "both wait for the sum"),
        ("torchrun multi node", FAQ, "how-do-i-run-on-two", "Run the same command on each"),
        ("how do I use my own dataset", FAQ, "how-do-i-train-my-own", "map-style or any iterable"),
        ("NCCL same order of collectives on every rank", FAQ, "must-all-ranks-call",
         "by their order alone"),
        ("loss is nan with fp16 but fine with bf16 GradScaler", FAQ, "my-loss-spikes",
         "exceeds 65504"),
        ("validation accuracy on all ranks DDP evaluate", FAQ, "how-do-i-evaluate",
         "all-reduce the sum and the count"),
        ("freeze layers with FSDP requires_grad use_orig_params", FAQ, "how-do-i-train-a-part",
         "for a unit that is partly frozen"),
        ("how much slower is gradient checkpointing", FAQ, "how-do-i-turn-on",
         "adds a third of the computing"),
        ("should the random seed be different on each rank", FAQ, "does-a-run-repeat",
         "one seed, the same for all ranks"),
        ("EMA of model weights with FSDP", FAQ, "how-do-i-keep-an-ema",
         "averages its own shards after each update"),
        ("no weight decay for bias and layernorm parameter groups FSDP", FAQ,
         "how-do-i-set-no-weight-decay", "`no_decay` takes globs of names"),
        ("out of memory with 128k context long sequence", FAQ, "how-do-i-train-on-long",
         "a part of every sequence"),
        ("GPU utilization 100% but training is slow", FAQ, "gpu-utilization",
         "any kernel ran, however small"),
        ("torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1331, unhandled "
         "system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.18.1", FAQ,
         "nccl-error", "Read the rank that failed first"),
        ("RuntimeError: Error(s) in loading state_dict for Net: Missing key(s) in state_dict: "
         '"conv1.weight". Unexpected key(s) in state_dict: "module.conv1.weight".', FAQ,
         "missing-key", "removes the prefix"),
        ("torch.distributed.elastic.multiprocessing.errors.ChildFailedError: train.py FAILED "
         "exitcode : -9 (pid: 4121) error_file: <N/A> Signal 9 (SIGKILL) received by PID 4121",
         FAQ, "childfailederror", "the host, not the GPU, is out of memory"),
        ("RuntimeError: DataLoader worker (pid 2721) is killed by signal: Bus error. It is "
         "possible that dataloader's workers are out of shared memory. Please try to raise your "
         "shared memory limit.", FAQ, "dataloader-worker", "`docker run --shm-size=8g`"),
        ("CUDA memory reserved much higher than allocated, fragmentation", FAQ,
         "cuda-out-of-memory", "expandable_segments:True"),
        ("number of attention heads not divisible by tensor parallel size", FAQ, "will-tp",
         "must divide the number of attention heads"),
        ("global batch size = micro batch size x gradient accumulation x GPUs, does tensor "
         "parallel count", FAQ, "what-is-a-microbatch",
         "do not count, as they work on the same samples"),
        ("debug distributed training with pdb breakpoint", FAQ, "how-do-i-use-a-debugger",
         "`torch.distributed.breakpoint(0)`"),
        ("RuntimeError: aten.mul.Tensor: got mixed torch.Tensor and DTensor, need to convert all "
         "torch.Tensor to DTensor before calling distributed operators!", FAQ, "got-mixed",
         "a forward reads a parameter of another module"),
        ("RuntimeError: CUDA error: device-side assert triggered CUDA kernel errors might be "
         "asynchronously reported at some other API call, so the stacktrace below might be "
         "incorrect. For debugging consider passing CUDA_LAUNCH_BLOCKING=1.", FAQ,
         "cuda-error-device-side", "an index out of range"),
        ("RuntimeError: one of the variables needed for gradient computation has been modified by "
         "an inplace operation: [torch.cuda.FloatTensor [64]] is at version 4; expected version 3 "
         "instead. Hint: enable anomaly detection", FAQ, "modified-by-an-inplace",
         "`broadcast_buffers=False`"),
        ("ValueError: Default process group has not been initialized, please make sure to call "
         "init_process_group.", FAQ, "default-process-group", "is started by torchrun"),
        ("why does the loss jump after resuming", FAQ, "why-does-the-loss-jump",
         "Because something was not restored"),
        ("恢复训练后 loss 跳变 数据顺序", FAQ, "why-does-the-loss-jump", "有些东西没有恢复"),
        ("为什么 DDP 的损失和单卡不一样", FAQ, "why-is-my-ddp-loss", "只是自己那部分样本的均值"),
        ("多卡训练 loss 和单卡不一致", FAQ, "why-is-my-ddp-loss", "只是自己那部分样本的均值"),
        ("ZeRO-2 8 卡 Adam 占多少显存", FAQ, "how-much-memory-does-adam", "其中 Adam 占 8 GB"),
        ("7B 模型需要多少显存", FAQ, "how-much-memory-does-a-7b", "占 126 GB"),
        ("ZeRO 各级别的区别", FAQ, "what-is-the-difference-between-ddp", "持有的字节数"),
        ("张量并行和流水线并行的区别", FAQ, "tensor-parallel-tp-or", "持有每一层的一部分"),
        ("NCCL watchdog 超时", FAQ, "my-run-hangs", "不在报错的 rank 上"),
        ("训练要多长时间", FAQ, "how-long-will-training", "即 52 小时"),
        ("训练要花多少钱", FAQ, "how-long-will-training", "413 GPU 小时"),
        ("多卡加速比低", FAQ, "why-are-two-gpus", "都要等待梯度求和"),
        ("怎样用 TensorBoard 或 wandb", FAQ, "how-do-i-watch", "指标还写到哪里"),
        ("什么是气泡 怎么缩小", FAQ, "what-is-a-bubble", "(p - 1) / (m + p - 1)"),
        ("8 张 A100 训练 8B 用什么布局", FAQ, "which-layout-for-8b", "答案是 `fsdp8+zero2`"),
        ("什么是全归约", FAQ, "what-is-an-all-reduce", "每个 rank 都有所有 rank 之和"),
        ("什么是微批次", FAQ, "what-is-a-microbatch", "一次前向和反向所用的样本"),
        ("怎样用梯度累积 no_sync", FAQ, "how-do-i-use-gradient", "把批次分成若干微批次"),
        ("FSDP 显存没有下降", FAQ, "why-is-gpu-memory-still", "不切分激活值"),
        ("NCCL 超时", FAQ, "my-run-hangs", "不在集合通信中的那个 rank"),
        ("换 GPU 数量断点续训", FAQ, "can-i-resume", "指定另一种布局即可"),
        ("增加 GPU 学习率 批次", FAQ, "do-i-change-the-batch", "所有 rank 合计的批次"),
        ("find_unused_parameters 报错", FAQ, "expected-to-have-finished", "与单设备相同"),
        ("多卡 BatchNorm 同步", FAQ, "do-i-need-syncbatchnorm", "在整个批次上统计"),
        ("FSDP LoRA 微调", FAQ, "how-do-i-train-with-lora", "只有适配器有梯度和状态"),
        ("张量并行和流水线并行怎么选", FAQ, "tensor-parallel-tp-or", "放在节点内"),
        ("bf16 损失突增", FAQ, "my-loss-spikes", '`precision.compute = "fp32"` 训练'),
        ("最后一个批次不整除 卡死", FAQ, "does-training-hang-at-the-end", "走的步数相同"),
        ("导出 Hugging Face 格式", FAQ, "how-do-i-export", "`from_pretrained` 能加载的目录"),
        ("用两台机器会快多少", FAQ, "how-much-faster", "强扩展保持批次不变"),
        ("什么是设备网格 mesh", FAQ, "what-is-a-device-mesh", "按布局的轴排列"),
        ("显存不足 OOM", FAQ, "cuda-out-of-memory", "先看什么占得多"),
        ("DDP 和 FSDP 的区别", FAQ, "what-is-the-difference-between-ddp", "保存全部状态"),
        ("梯度裁剪", FAQ, "does-gradient-clipping", "整个模型全部梯度的范数"),
        ("训练 70B 需要多少张卡", FAQ, "how-many-gpus", "16 字节"),
        ("数据加载慢 num_workers", FAQ, "is-data-loading-slow", "`data.workers`：每个 rank"),
        ("分词在哪里做 每个进程都要分词吗", FAQ, "where-is-text-tokenized", "在训练之前分词一次"),
        ("MoE 专家负载不均衡 怎么办", FAQ, "how-do-i-balance", "移动门控的偏置"),
        ("指定用哪几张显卡 CUDA_VISIBLE_DEVICES", FAQ, "how-do-i-choose-the-gpus",
         "只看到这几张显卡"),
        ("fp16 和 bf16 怎么选 V100", FAQ, "what-is-mixed-precision", "不支持 bf16，请用 fp16"),
        ("多机训练要开放哪些端口 防火墙", FAQ, "address-already-in-use", "开放全部 TCP 端口"),
        ("样本长度不同 padding packing 拼接", "data", "samples-of-several-lengths",
         "把几个短样本依次拼接成一个"),
        ("DataParallel vs DistributedDataParallel", "systems/data_parallel", "nndataparallel",
         "this is why DDP, FSDP and weft start one process per device"),
        ("8 GPUs are only 3x faster than one GPU with DDP, why?", FAQ, "why-are-two-gpus",
         "both wait for the sum"),
        ("do I need to scale the learning rate when I go from 1 GPU to 8 GPUs?", FAQ,
         "do-i-change-the-batch", "make the batch N times larger"),
        ("how much GPU memory do I need to full fine-tune a 7B model with AdamW in bf16?", FAQ,
         "how-much-memory-does-a-7b", "7 billion take 126 GB"),
        ("FSDP vs DeepSpeed ZeRO-3, are they the same thing?", FAQ,
         "what-is-the-difference-between-ddp", "`+zero3` (the default) weights too"),
        ("when do I need tensor parallelism instead of FSDP", FAQ, "which-axis-do-i-need",
         "the activations of one sample do not fit"),
        ("how to train with 128k context length without OOM on 8 H100s", FAQ,
         "how-do-i-train-on-long", "a part of every sequence"),
        ("what is the difference between global batch size and micro batch size", FAQ,
         "what-is-a-microbatch", "not that of each GPU"),
        ("bf16 vs fp16 which one needs loss scaling and why does my loss become NaN", FAQ,
         "my-loss-spikes", "only fp16 needs loss scaling"),
        ("how do I launch training on 2 nodes with 8 GPUs each with torchrun", FAQ,
         "how-do-i-run-on-two", "torchrun --nnodes 2"),
        ("slurm", "clusters", "slurm", "sbatch job.sh"),
        ("save a FSDP checkpoint on 8 GPUs and resume on 4 GPUs", FAQ, "can-i-resume",
         "name another layout"),
        ("train over slow internet connection between two sites, DiLoCo how many inner steps",
         "systems/local_sgd", "how-to-choose-h", "H = t / (a s)"),
        ("how do I add my own loss function with extra inputs", FAQ, "how-do-i-train-my-own",
         "names your loss"),
        ("loss extra inputs", "losses", "a-loss-of-your-own", "are entries of the batch"),
        ("how to evaluate on a validation set every 500 steps", FAQ, "how-do-i-evaluate",
         'is called with `split="val"`'),
        ("log to wandb or tensorboard only on rank 0", FAQ, "do-i-print",
         "prints and logs once for all ranks"),
        ("MoE load balancing", FAQ, "how-do-i-balance", "adds a loss that evens out the load"),
        ("verify fails with loss differs at step 1, where do I start looking", FAQ,
         "weft-verify-says", "first difference"),
        ("convert trained checkpoint to Hugging Face safetensors to use in vLLM", FAQ,
         "how-do-i-export", "vLLM and other engines load"),
        ("stale gradients", "systems/convergence", "staleness", "acts like a larger step"),
        ("HSDP", "layouts", "coming-from-torch", "a 2-D mesh (HSDP)"),
        ("why does GPU 0 use more memory than the other GPUs", FAQ, "why-does-gpu-0",
         "other processes have a CUDA context there"),
        ("how many warmup steps for large batch training", FAQ, "how-many-warm-up",
         "about 2 / (1 - beta2) steps"),
        ("train on a mix of several datasets with different weights", FAQ, "how-do-i-mix",
         "furthest behind its weight"),
        ("how long does it take to pretrain a 1B model on 20B tokens on 8 A100", FAQ,
         "how-long-will-training", "6 x parameters x tokens"),
        ("use torch.compile with FSDP, recompiles every step", FAQ, "does-torchcompile",
         "A graph is compiled again when"),
        ("FP8 training on H100: how much faster and does accuracy suffer", FAQ, "is-float8",
         "1.18 times as fast"),
        ("write a callback that generates samples every N steps", FAQ, "how-do-i-write-a-callback",
         "`on_step_end` is called after each step"),
        ("custom callback", "watching", "callbacks", "Prints how the model goes on from a prompt"),
        ("can I train on AMD GPUs with ROCm, or on Apple M1", FAQ, "which-versions",
         "torch's build for ROCm"),
        ("results differ on every run although I set the seed, how to make training "
         "deterministic", FAQ, "does-a-run-repeat", "use_deterministic_algorithms(True)"),
        ("fine-tune a vision transformer", "recipes", "fine-tune-a-vision-transformer",
         "ViTForImageClassification"),
        ("ring all-reduce", "systems/collectives", "ring-all-reduce", "2 (N-1)/N S in all"),
        ("多卡训练的 batch size 怎么设置，每张卡的 batch size 还是总的", FAQ,
         "what-is-a-microbatch", "它是总的 batch size"),
        ("70B 模型用 64 张 A100 怎么切，TP PP DP 各设多少", FAQ, "how-many-gpus",
         "跨节点用 `pp`"),
        ("梯度累积和直接用大 batch 结果一样吗", FAQ, "how-do-i-use-gradient",
         "把批次分成若干微批次"),
        ("激活值占多少显存，激活重计算能省多少", FAQ, "how-do-i-turn-on", "降到 2.1 GiB"),
        ("训练跑着跑着卡住不动了", FAQ, "my-run-hangs", "不在集合通信中的那个 rank"),
        ("怎么用自己的数据集训练", FAQ, "how-do-i-train-my-own", "任何可迭代对象"),
        ("MFU 怎么算，多少算正常", FAQ, "what-are-mfu", "计算公式是"),
        ("PowerSGD 梯度压缩会影响精度吗", "systems/compression", "what-it-does",
         "200 步后的评估损失"),
        ("LoRA 微调 7B 单卡 24G 显存够吗", FAQ, "how-much-memory-does-lora", "占显存的是基座模型"),
        ("一台机器掉了训练怎么自动恢复", FAQ, "a-machine", "用三台继续"),
        ("流水线各阶段不均衡 模型在哪里切开", FAQ, "pipeline-stages-are", "少分到几个块"),
        ("单卡训练代码怎么改成多卡", FAQ, "how-do-i-turn-a-script", "代替 `model.to(device)`"),
        ("通信占了多少时间，怎么和计算重叠", FAQ, "is-communication", "被掩盖"),
        ("MoE 训练 EP 和 TP 怎么选", FAQ, "moe-expert-parallelism", "让专家保持完整"),
        ("DPO 偏好训练怎么做", "recipes", "preferences-dpo", "冻结拷贝"),
        ("Muon 优化器能和 FSDP 一起用吗", FAQ, "which-optimizer-needs", "所有的轴上都能用"),
        ("抢占式实例（spot）被回收了怎么办", FAQ, "my-run-was-killed", "先会收到 SIGTERM"),
        ("how much memory do the activations of one transformer layer take", FAQ,
         "how-do-i-turn-on", "34 s b h bytes"),
        ("how many microbatches do I need for 4 pipeline stages", "pipelines",
         "how-many-microbatches", "with 16 for four stages, ranks wait 3/19 = 16%"),
        ("what is the critical batch size", "systems/convergence", "the-critical-batch-size",
         "McCandlish et al. 2018"),
        ("is tensor parallel bit-identical to one GPU", FAQ, "is-tensor-parallel",
         "layouts add in another order"),
        ("how much more communication does ZeRO-3 have than DDP", FAQ,
         "what-is-the-difference-between-ddp", "`+zero3` sends 1.5 times as many"),
        ("how big is the checkpoint of a 7B model", FAQ, "how-big-is-a-checkpoint",
         "12 bytes per parameter with Adam"),
        ("how many parameters can I train on one 24 GB GPU", FAQ, "how-much-memory-does-a-7b",
         "trains about 1 billion parameters"),
        ("what is the difference between 1F1B and GPipe", "systems/pipeline", "",
         "GPipe's first rank holds all 4 = m"),
        ("RuntimeError: Expected all tensors to be on the same device, but found at least two "
         "devices, cuda:0 and cuda:1!", FAQ, "expected-all-tensors",
         "`torch.cuda.set_device(local_rank)`"),
        ("every rank gets the same batch", FAQ, "do-i-need-a-distributedsampler",
         "every rank reads the same batch, unless"),
        ("stop training early when the validation loss stops improving", FAQ,
         "how-do-i-stop-early", "callback `EarlyStopping`"),
        ("one GPU is slower than the others, how do I find it", FAQ, "one-gpu-rank-is-slower",
         "what each rank does without those waits"),
        ("keep only the best checkpoint", FAQ, "how-do-i-keep-the-best", "keep_best = true"),
        ("cosine learning rate schedule with warmup", FAQ, "how-many-warm-up",
         "`train.decay` how it falls"),
        ("RuntimeError: mat1 and mat2 must have the same dtype, but got Float and BFloat16", FAQ,
         "mat1-and-mat2", "mat1 is the input, mat2 the weight"),
        ("test distributed training on a laptop without a GPU", FAQ, "can-i-train-or-test",
         "runs four of them on the CPU of a laptop"),
        ("序列并行和上下文并行的区别", "systems/sequence_context", "", "两种沿序列切分的方法"),
        ("交错流水线有什么好处", "systems/interleaved_zero_bubble", "",
         "流水线填满所需的时间降为 1/v"),
        ("反向传播的计算量是前向的几倍", "systems/memory", "what-it-costs-in-time",
         "反向的计算量是前向的两倍"),
        ("什么是专家并行", "systems/experts", "", "专家并行把不同专家放在不同 rank 上"),
        ("怎么画 loss 曲线", FAQ, "how-do-i-watch", "曲线画进一个 HTML 文件"),
        ("怎么用 profiler 找训练瓶颈", FAQ, "my-step-is-slow", "`train.profile` 记录"),
        ("torchrun 多机连接超时 Connection refused", FAQ, "address-already-in-use",
         "开放全部 TCP 端口"),
        ("怎么只加载权重，不加载优化器状态", FAQ, "can-i-load-the-weights", "Adam 从没有状态开始"),
        ("weft vs torchtitan vs Megatron-LM, why use this", FAQ, "why-weft",
         "compares the loss, every gradient and every weight"),
        ("weft vs pytorch lightning", FAQ, "why-weft", "`weft launch ray` runs on it"),
        ("is weft production ready, limitations, largest scale tested", FAQ, "what-are-wefts",
         "not tested or measured on GPUs"),
        ("can I use it commercially license", FAQ, "which-license", "use, change and sell it"),
        ("how much bandwidth between nodes do I need for data parallel of a 7B model", FAQ,
         "do-i-need-nvlink", "4.5 s at 100"),
        ("torch.distributed all_gather tensors of different shapes hangs", FAQ,
         "must-all-ranks", "pad each tensor to the largest"),
        ("RuntimeError: shape '[8, 1024, 32, 64]' is invalid for input of size when using tensor "
         "parallel", FAQ, "will-tp", "`x.view(batch, length, -1, 16)`"),
        ("AssertionError: Torch not compiled with CUDA enabled", FAQ, "torch-not-compiled",
         "`torch.version.cuda` is None"),
        ("run in docker container", FAQ, "how-do-i-install-and-run", "`docker run --gpus all"),
        ("stream a dataset larger than disk from S3", FAQ, "my-dataset-does-not-fit",
         "`pip install s3fs`"),
        ("reinforcement learning GRPO with weft", FAQ, "can-i-do-rlhf",
         "the old log probabilities"),
        ("GPU memory grows every step, memory leak", FAQ, "my-gpu-uses-more",
         "each with the graph of its step"),
        ("is dropout the same on every rank", FAQ, "does-a-run-repeat",
         "dropout still draws other numbers for each sample"),
        ("what is rendezvous and what does c10d backend do", "systems/start_up",
         "what-happens-in-init_process_group", "its agents meet at a store of their own"),
        ("generate text with the trained model, load for inference on one GPU without weft", FAQ,
         "how-do-i-export", "for plain torch, which needs no weft"),
        ("save checkpoints to S3", FAQ, "how-big-is-a-checkpoint", "`aws s3 sync`"),
        ("disk is full, no space left on device", FAQ, "how-big-is-a-checkpoint",
         "older checkpoints remain"),
        ("train a diffusion model or a UNet", FAQ, "which-models-can-i-train",
         "draws its time and noise in its forward"),
        ("why does weft take long to start before the first step", FAQ,
         "why-does-it-take-long-to-start", "imports torch and your code"),
        ("how many tokens should I train a 1B model on, Chinchilla", FAQ, "how-long-will-training",
         "about 20 per parameter"),
        ("upgrade to a newer version of PyTorch 2.14", FAQ, "which-versions", "no newer one"),
        ("training suddenly becomes slower", FAQ, "my-step-is-slow", "lowers its clock"),
        ("training stops when I close the ssh terminal", FAQ, "my-run-was-killed",
         "start it in tmux"),
        ("和 DeepSpeed、Megatron 相比有什么优势，为什么不用它们", FAQ, "why-weft",
         "比较损失、每个梯度和每个权重"),
        ("weft 有什么局限 能不能用于生产", FAQ, "what-are-wefts", "没有在 GPU 上测试"),
        ("开源协议是什么，可以商用吗", FAQ, "which-license", "可以使用、修改和出售"),
        ("RuntimeError: CUDA error: no kernel image is available 或驱动版本不匹配", FAQ,
         "torch-not-compiled", "不在 `torch.cuda.get_arch_list()` 里"),
        ("在 Docker 容器里怎么安装和运行", FAQ, "how-do-i-install-and-run",
         "`docker run --gpus all"),
        ("没有网络怎么安装", FAQ, "how-do-i-install-and-run", "收集 wheel 文件"),
        ("怎么监控显存随时间的变化 显存泄漏 每一步都在涨", FAQ, "my-gpu-uses-more",
         "都带着那一步的计算图"),
        ("强化学习 GRPO RLHF 能做吗", FAQ, "can-i-do-rlhf", "旧的对数概率"),
        ("节点之间需要多大网络带宽", FAQ, "do-i-need-nvlink", "100 时 4.5 秒"),
        ("all_gather 不同 rank 张量形状不同", FAQ, "must-all-ranks", "补齐到最大的"),
        ("从 S3 流式读取数据集", FAQ, "my-dataset-does-not-fit", "`pip install s3fs`"),
        ("验证集损失上升 过拟合", FAQ, "how-do-i-stop-early", "`EarlyStopping`"),
        ("扩散模型能训练吗", FAQ, "which-models-can-i-train", "在前向里抽取时间和噪声"),
        ("怎么在终端断开后继续训练 nohup tmux", FAQ, "my-run-was-killed", "在 tmux 里启动"),
        ("训练速度突然变慢", FAQ, "my-step-is-slow", "GPU 过热会降频"),
        ("全量微调还是 LoRA", FAQ, "how-do-i-train-with-lora", "它学到的较少"),
        ("1B 模型要用多少词元训练", FAQ, "how-long-will-training", "每个参数约 20 个词元"),
        ("why does DDP not save any memory", FAQ, "why-is-gpu-memory-still",
         "it saves none of these"),
        ("how do I choose the micro batch size", FAQ, "what-is-a-microbatch",
         "take the largest that fits"),
        ("is CPU offload slow", FAQ, "how-do-i-offload", "86.6 s in place of 78"),
        ("how do I train my own PyTorch model with weft", FAQ, "how-do-i-train-my-own",
         "The model is plain PyTorch for one device"),
        ("how do I check that my parallel training is correct", FAQ, "how-do-i-check",
         "every gradient and every weight"),
        ("where is a list of all options of the config", FAQ, "where-is-a-list",
         "every key with its type, default and meaning"),
        ("loss does not go down", FAQ, "my-loss-does-not-go-down", "learn a few samples by heart"),
        ("GPU utilization is 0% and nothing is printed", FAQ, "why-does-it-take-long-to-start",
         "Meanwhile the GPU is at 0%"),
        ("first step is much slower than the rest", FAQ, "why-does-it-take-long-to-start",
         "loads CUDA's kernels"),
        ("ModuleNotFoundError: No module named 'my_model'", FAQ, "modulenotfounderror",
         "beside the run file, then in the current directory"),
        ("which kind of parallelism should a beginner learn first", FAQ, "which-axis-do-i-need",
         "learn these two first"),
        ("can I train a 7B model on four RTX 4090", FAQ, "how-much-memory-does-a-7b",
         "Four such GPUs have 96 GB"),
        ("what is mixed precision training", FAQ, "what-is-mixed-precision",
         "computes in 16 bits"),
        ("what is the difference between data parallel and model parallel", FAQ,
         "tensor-parallel-tp-or", "they divide the model"),
        ("why does saving a checkpoint take so long", FAQ, "how-often-should-i-save",
         "the next save waits for it"),
        ("数据并行和模型并行有什么区别", FAQ, "tensor-parallel-tp-or", "切分的是模型"),
        ("all-reduce 和 all-gather 有什么区别", FAQ, "what-is-an-all-reduce",
         "每个 rank 都有所有的分片"),
        ("4 张 4090 能训练 7B 模型吗", FAQ, "how-much-memory-does-a-7b", "4 张这样的 GPU 共 96 GB"),
        ("什么是混合精度训练", FAQ, "what-is-mixed-precision", "混合精度用 16 位计算"),
        ("为什么多卡训练显存没有减少", FAQ, "why-is-gpu-memory-still", "这些都省不了"),
        ("新手应该先学哪种并行方式", FAQ, "which-axis-do-i-need", "先学这两个"),
        ("怎么检查我的并行训练结果是对的", FAQ, "how-do-i-check", "退出码 0 表示全部相等"),
        ("保存检查点时卡住很久", FAQ, "how-often-should-i-save", "下一次保存就要等待"),
        ("微批次大小怎么选", FAQ, "what-is-a-microbatch", "取放得下的最大值"),
        ("CPU 卸载会很慢吗", FAQ, "how-do-i-offload", "一步 86.6 秒"),
        ("怎么用 weft 训练自己的 PyTorch 模型", FAQ, "how-do-i-train-my-own",
         "就是单设备的 PyTorch 模型"),
        ("有哪些配置项", FAQ, "where-is-a-list", "每个键的类型、默认值和含义"),
        ("loss 不下降怎么办", FAQ, "my-loss-does-not-go-down", "先让单设备记住几个样本"),
        ("第一步特别慢", FAQ, "why-does-it-take-long-to-start", "加载 CUDA 的 kernel"),
        ("显卡利用率为 0，没有任何输出", FAQ, "why-does-it-take-long-to-start", "GPU 利用率是 0%"),
        ("ModuleNotFoundError 找不到模块", FAQ, "modulenotfounderror", "先在运行文件旁边找"),
        ("how do I compare two training runs with different hyperparameters side by side", "report",
         "compare-two-training-runs", "which settings (hyperparameters) differ"),
        ("what do the columns of weft plan mean, what is exposed communication", "planner",
         "how-to-read-a-plan", "the part that does not overlap with computing"),
        ("how do I train for 3 epochs instead of a number of steps", FAQ,
         "how-do-i-train-for-a-number", "With `train.epochs = 3` in place of `train.steps`"),
        ("my training is finished but I want to train for 10000 more steps", FAQ,
         "a-run-is-finished", "the same command a larger `train.steps`"),
        ("does the order of the axes matter, pp2.dp2.tp2 or tp2.dp2.pp2", FAQ,
         "what-do-the-letters", "The order does not change what is computed"),
        ("how do I know if my model fits on an H100 before I rent one", FAQ,
         "what-fills-gpu-memory", "such as an H100 before you rent one"),
        ("translate my deepspeed ds_config.json with zero_optimization stage 3", "from_trainer",
         "from-deepspeed", "| `zero_optimization.stage` 1, 2 or 3 |"),
        ("transformer_auto_wrap_policy: which modules does FSDP wrap", "layouts",
         "what-is-gathered-together", "weft finds the blocks by itself"),
        ("RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with "
         "multiprocessing, you must use the 'spawn' start method", FAQ, "cannot-re-initialize",
         "Let it return tensors on the CPU"),
        ("GPU memory is still occupied after Ctrl-C, nvidia-smi shows python processes", FAQ,
         "gpu-memory-is-still-occupied", "`kill -9 PID` if it stays"),
        ("how do I increase the NCCL timeout of 10 minutes", FAQ, "how-do-i-increase-the-timeout",
         "timeout=timedelta(hours=1)"),
        ("host RAM runs out when every rank loads the whole pretrained model", FAQ,
         "host-memory-ram", "reads the bytes of its own shards"),
        ("different learning rate for the head and the backbone", "optimizers", "parameter-groups",
         '`"head.*" = { lr = 1e-3 }`'),
        ("tied embeddings (lm_head shares weights) with pipeline parallel", FAQ,
         "do-tied-embeddings", "sum its gradient once per step"),
        ("what is the difference between weft plan, weft simulate, weft trial and weft verify", FAQ,
         "what-is-the-difference-between-weft-plan", "A usual order is doctor, plan, verify"),
        ("how accurate is the predicted step time", "planner", "how-accurate",
         "a step is off by 9.0 %"),
        ("布局 pp2.dp2.tp2 里的字母和数字是什么意思", FAQ, "what-do-the-letters",
         "字母是[轴](layouts.zh.md#轴)的名字"),
        ("支持 QLoRA 4bit 量化训练吗", "fine_tuning", "a-base-in-8-bits", '`"nf4"`'),
        ("Windows 上能用吗 WSL2", FAQ, "which-versions", "WSL2 是 Windows 上的 Linux"),
        ("NCCL_SOCKET_IFNAME 多网卡机器怎么选网卡", FAQ, "several-network-cards",
         "weft 用通往 `--rdzv` 地址的那个"),
        ("数据增强的随机数每张卡一样吗", FAQ, "does-a-run-repeat", "写在模型前向里的数据增强也是"),
        ("显存都被什么占了 权重 梯度 优化器 激活值", FAQ, "what-fills-gpu-memory",
         "权重、梯度、优化器状态、激活值，以及驱动"),
        ("训练中途怎么修改学习率或 batch size", FAQ, "a-run-is-finished",
         "`optimizer.lr`、`train.accumulate` 和布局也可以改"),
        ("怎么记录梯度范数 判断梯度爆炸", FAQ, "does-gradient-clipping", "只记录、不裁剪"),
        ("训练过程中能增加机器吗 弹性训练", FAQ, "a-machine", "新的机器也这样加入"),
        ("训练结束后继续训练更多步", FAQ, "a-run-is-finished", "同一条命令，加上更大的"),
        ("按 Ctrl-C 之后进程没杀干净 显存还被占用", FAQ, "gpu-memory-is-still-occupied",
         "`kill -9 PID`"),
        ("NCCL 超时时间怎么调大", FAQ, "how-do-i-increase-the-timeout",
         "timeout=timedelta(hours=1)"),
        ("怎么按 epoch 数训练", FAQ, "how-do-i-train-for-a-number", "代替 `train.steps`"),
        ("每个进程都加载模型 内存爆了", FAQ, "host-memory-ram", "自己那些分片的字节"),
        ("ds_config.json 怎么迁移", "from_trainer", "from-deepspeed",
         "`zero_optimization.stage` 为"),
        # real questions of threads on GitHub and in forums
        ("difference between FSDP1 and FSDP2", FAQ, "what-is-the-difference-between-fsdp1",
         "flattens the parameters of a unit"),
        ("what is an FSDP unit, reshard_after_forward", FAQ,
         "what-is-the-difference-between-fsdp1", "frees gathered weights after forward"),
        ("ZeRO-3 saved model file is tiny, weights are empty", FAQ, "the-saved-model-file",
         "placeholders of size 0"),
        ("how to convert a Megatron checkpoint to Hugging Face, merge tensor parallel shards", FAQ,
         "can-i-read-convert", "merges its tensor-parallel shards"),
        ("learning rate scheduler steps too fast with multiple GPUs", FAQ,
         "the-learning-rate-scheduler", "N times for each update"),
        ("how do I set steps_per_epoch of the scheduler with several GPUs", FAQ,
         "the-learning-rate-scheduler", "already divided by the GPUs"),
        ("RendezvousTimeoutError torchrun", FAQ, "address-already-in-use", "a firewall"),
        ("srun torchrun how many ntasks-per-node", FAQ, "how-do-i-run-on-two",
         "`--ntasks-per-node=1`"),
        ("rank 0 is not on the host of MASTER_ADDR, init_process_group", "systems/start_up",
         "what-happens", "rank 0 need not be on host0"),
        ("NCCL hangs on RTX 4090, NCCL_P2P_DISABLE", FAQ, "nccl-error",
         "on GeForce cards (RTX 4090)"),
        ("Gradient overflow. Skipping step, reducing loss scale: is it normal", FAQ,
         "gradient-overflow", "a few skipped steps at the start"),
        ("Current loss scale already at minimum - cannot decrease scale anymore", FAQ,
         "gradient-overflow", "infinite or NaN at any scale"),
        ("are gradients averaged or summed in DDP", FAQ, "are-gradients-averaged",
         "divide by their number"),
        ("router z-loss balance experts", FAQ, "how-do-i-balance", "the router z-loss"),
        ("resume from the middle of an epoch, state of the dataloader", FAQ, "my-run-was-killed",
         "in the middle of an epoch too"),
        ("float8 with tensor parallel", FAQ, "is-float8", "works under `tp`"),
        ("difference between e4m3 and e5m2", FAQ, "is-float8", "ends at 57,344"),
        ("sample packing: do documents attend to each other", "data",
         "samples-of-several-lengths", "no one attends to another"),
        ("is local SGD the same as gradient accumulation", "systems/local_sgd",
         "gradient-accumulation-and-federated", "at the *same* weights"),
        ("is this the same as federated learning", "systems/local_sgd",
         "gradient-accumulation-and-federated", "whose replicas are clients"),
        ("Expected to mark a variable ready only once", FAQ, "expected-to-mark",
         "gets its gradient twice"),
        ("use_reentrant parameter should be passed explicitly", FAQ, "expected-to-mark",
         "Pass `use_reentrant=False`"),
        ("InfiniBand not used in docker, NCCL says NET/Socket", FAQ, "is-infiniband",
         "`Using network IB`"),
        ("what is GPUDirect RDMA", FAQ, "is-infiniband", "reads the GPU's memory itself"),
        ("8-bit Adam with FSDP", FAQ, "which-optimizer-needs", "Adam with 8-bit moments"),
        ("can I train with Adafactor", FAQ, "which-optimizer-needs", "each row and column"),
        ("do I need passwordless ssh and a hostfile", FAQ, "how-do-i-run-on-two",
         "No ssh and no hostfile"),
        ("different number of GPUs on each node", FAQ, "how-many-gpus-do-i-need",
         "use as many as the smallest"),
        ("Setting OMP_NUM_THREADS environment variable for each process to be 1", FAQ,
         "setting-omp_num_threads", "does not follow torchrun's 1"),
        ("what is ring attention", "systems/sequence_context", "context-parallelism",
         "keys and values travel round"),
        ("what is 3D parallelism", "systems/hybrids", "well-known-hybrids", "3D, Megatron"),
        ("can I train in pure bf16, without fp32 master weights", FAQ, "why-float32-master",
         "1 + 0.003 is 1"),
        ("how to read a torch profiler trace in Chrome", "watching", "a-profile-of-chosen",
         "`chrome://tracing`"),
        ("can I train on TPU", FAQ, "which-versions", "TPUs and NPUs"),
        ("hyperparameter search over several GPUs", FAQ, "how-do-i-search",
         "weft has no search of its own"),
        ("fine-tune a vision-language model", FAQ, "which-models-can-i-train", "Qwen2-VL"),
        ("train Llama 3 8B example", FAQ, "how-do-i-start", "the shape of Llama 3 8B"),
        ("does cross entropy over a big vocabulary need much memory", "layouts",
         "large-vocabularies", "4 GiB in float32"),
        ("can I change the sequence length during training", FAQ, "a-run-is-finished",
         "longer sequences in a second phase"),
        ("how do I reproduce a paper's batch size of 4M tokens", FAQ, "what-is-a-microbatch",
         "488 samples"),
        ("多卡训练的loss是取平均还是求和", FAQ, "are-gradients-averaged", "再除以 rank 数"),
        ("单机多卡和多机多卡有什么区别", FAQ, "how-do-i-run-on-two", "单机多卡时，一条命令"),
        ("local_rank 和 rank 有什么区别", FAQ, "what-is-a-device-mesh", "进程在本机上的编号"),
        ("4张3060没有NVLink比单卡还慢", FAQ, "why-are-two-gpus", "都要等待梯度求和"),
        ("为什么只有第一张显卡的显存上升", FAQ, "why-does-gpu-0", "只有一个进程"),
        ("master_addr 和 master_port 怎么设置", FAQ, "address-already-in-use",
         "所有机器设成一样"),
        ("每台机器的卡数必须一样吗", FAQ, "how-do-i-run-on-two", "可以各不相同"),
        ("容器里能用RDMA吗", FAQ, "is-infiniband", "--device /dev/infiniband"),
        ("ZeRO各阶段的通信量是多少", "systems/zero", "the-formulas", "发送量是 DDP 的 1.5 倍"),
        ("GPipe和1F1B的区别", "systems/pipeline", "", "这段等待就是"),
        ("DP和DDP有什么区别", FAQ, "what-is-the-difference-between-ddp", "只有一个进程，0 号 GPU"),
        ("混合精度训练为什么要保存fp32主权重", FAQ, "why-float32-master", "1 + 0.003 还是 1"),
        ("MoE all-to-all通信太慢怎么办", FAQ, "the-all-to-all", "让负载均衡"),
        ("训练到一半卡住了GPU利用率一直100%", FAQ, "my-run-hangs", "等待的 NCCL kernel"),
        ("FSDP和ZeRO-3是一样的吗", FAQ, "what-is-the-difference-between-ddp", "持有的字节数"),
        ("64张卡怎么配置3D并行", "systems/hybrids", "", "发送最多的"),
        ("为什么多卡训练精度下降", FAQ, "do-i-change-the-batch", "精度会下降"),
        ("怎么在jupyter里多卡训练", "python", "starting-ranks", "engine = weft.Engine"),
        ("不同型号的显卡可以一起训练吗", FAQ, "do-i-need-nvlink", "最慢的"),
        ("怎么只训练最后几层", FAQ, "how-do-i-train-a-part", "没有梯度"),
        # of a student, a startup, a user of Lightning, an admin of a cluster, an owner of a laptop
        ("why processes and not threads in distributed training", "systems/data_parallel",
         "nndataparallel", "N processes have N interpreters"),
        ("can I see a timeline of what each GPU does in the pipeline", "pipelines",
         "what-a-run-did", "draws the last of them below a simulation"),
        ("our training crashed at night, how do I get an alert in Slack", "metrics", "alerts",
         "weft sends no messages"),
        ("is the traffic between nodes encrypted", "security", "the-token", "It does not encrypt"),
        ("how do I limit the GPU memory, leave memory for other processes on the same GPU", FAQ,
         "how-do-i-choose-the-gpus", "set_per_process_memory_fraction"),
        ("what replaces LightningModule training_step and configure_optimizers", FAQ,
         "how-do-i-move-from-pytorch-lightning", "returns a sum and a count"),
        ("how do I use my LightningDataModule", FAQ, "how-do-i-move-from-pytorch-lightning",
         "`split=\"val\"` for validation"),
        ("jobs die at the wall time limit, can they requeue automatically", "clusters", "slurm",
         "ranks finish their step and save"),
        ("python import is slow on a shared file system with hundreds of ranks", FAQ,
         "why-does-it-take-long-to-start", "each host's own disk"),
        ("can it run with mpirun instead of torchrun", "systems/start_up", "by-hand",
         "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("how long does the quickstart take on a CPU laptop", "start", "first-run",
         "less than a minute on two CPU cores"),
        ("为什么反向传播的时候就开始通信了", "systems/ddp", "", "桶"),
        ("显存占用怎么估算 公式", "systems/memory", "the-parts", "激活值"),
        ("8卡4090没有NVLink能用张量并行吗", FAQ, "do-i-need-nvlink", "60% 的时间在等待"),
        ("怎么限制每张卡使用的显存", FAQ, "how-do-i-choose-the-gpus",
         "set_per_process_memory_fraction"),
        ("训练日志里的 sent 和 waited 是什么意思", "metrics", "the-line-of-the-log",
         "`waited` 是 `sync_exposed_s`"),
        ("怎么从 PyTorch Lightning 迁移", FAQ, "how-do-i-move-from-pytorch-lightning",
         "返回总和与个数"),
        ("can I train in int8", FAQ, "can-i-train-in-int8",
         "weft computes in fp32, bf16, fp16 or fp64"),
        ("adam beta2 0.95 or 0.999 and epsilon for large batch", FAQ, "which-adam-betas",
         "betas 0.9 and 0.95 are usual"),
        ("loss spike go back to an earlier checkpoint", FAQ, "how-do-i-go-back",
         "has no option for another one"),
        ("does gradient accumulation slow down training", FAQ, "does-gradient-accumulation-slow",
         "same batch in more, smaller microbatches"),
        ("pause training overnight and continue tomorrow", FAQ, "how-do-i-pause",
         "finishes its step, saves a checkpoint"),
        ("share one gpu server with other people fairly", FAQ, "how-do-i-share",
         "weft has no queue"),
        ("how much time is left ETA", FAQ, "how-much-time-is-left", "`left 0:01:20`"),
        ("how many bytes does each gpu send per step", FAQ, "how-many-bytes",
         "sends 52 GiB in a step"),
        ("why does my loss converge slower on multiple GPUs", FAQ, "why-does-the-loss-converge",
         "an epoch has N times fewer updates"),
        ("kaggle 2 x T4 how to use both gpus", FAQ, "how-do-i-use-both",
         "`!weft train run.toml --layout dp2`"),
        ("can I run this on my macbook", FAQ, "can-i-train-or-test", "not on Apple's GPU (MPS)"),
        ("RuntimeError: size mismatch for lm_head.weight: copying a param with shape torch.Size",
         FAQ, "size-mismatch",
         "another shape than the model's"),
        ("should I buy two 4090s or rent an H100", FAQ, "which-gpus-should-i-buy",
         "four 33.5k, one H100 39.2k"),
        ("whisper speech fine-tuning variable length audio", FAQ, "how-do-i-fine-tune-whisper",
         "`speech-seq2seq` for Whisper"),
        ("DataLoader num_workers too many open files", FAQ, "too-many-open-files",
         "`ulimit -n 65536`"),
        ("GPU utilization is low 30%", FAQ, "gpu-utilization-is-low", "the GPU waits, for batches"),
        ("hf download is slow, huggingface mirror", FAQ, "the-download-from", "hf-mirror.com"),
        ("多卡训练收敛变慢怎么办", FAQ, "why-does-the-loss-converge",
         "一个 epoch 的更新次数只有 1/N"),
        ("能不能用 int8 训练", FAQ, "can-i-train-in-int8", "int8 的 255 个值间隔相等"),
        ("beta2 设 0.95 还是 0.999", FAQ, "which-adam-betas",
         "语言模型的预训练一般用 betas 0.9 和 0.95"),
        ("loss 突增后怎么回滚到之前的检查点", FAQ, "how-do-i-go-back", "没有选项可以指定别的"),
        ("梯度累积会变慢吗", FAQ, "does-gradient-accumulation-slow", "更多、更小的微批次"),
        ("晚上暂停训练 明天继续", FAQ, "how-do-i-pause", "运行走完这一步，保存检查点"),
        ("多人共用一台 GPU 服务器", FAQ, "how-do-i-share", "weft 没有排队功能"),
        ("训练剩余时间在哪看", FAQ, "how-much-time-is-left", "剩下的步数乘以"),
        ("每张卡每步发送多少数据 通信量", FAQ, "how-many-bytes", "每步发送 52 GiB"),
        ("单机两卡怎么启动", FAQ, "how-do-i-turn-a-script",
         "单机两卡用 `weft train run.toml --layout dp2`"),
        ("国内下载不了 huggingface 模型", FAQ, "the-download-from", "hf-mirror.com"),
        ("怎么看每张卡的显存占用", FAQ, "my-gpu-uses-more", "每张卡的峰值在 `ranks.json` 里"),
        ("MoE 专家并行需要几张卡", FAQ, "moe-expert-parallelism", "要能整除专家数"),
        ("size mismatch 形状不匹配 加载权重报错", FAQ, "size-mismatch",
         "文件里的张量与模型的形状不同"),
        ("买两张 4090 还是租 H100", FAQ, "which-gpus-should-i-buy", "得到的小时数就是用多久才划算"),
        ("Too many open files 打开文件过多", FAQ, "too-many-open-files", "`ulimit -n 65536`"),
        ("OOM at validation only", FAQ, "cuda-out-of-memory-oom-only",
         "a metric of yours that keeps outputs"),
        ("val loss higher than train loss overfitting", FAQ, "the-validation-loss",
         "learns the samples by heart"),
        ("how do I use a learning rate finder", FAQ, "which-learning-rate", "weft has no finder"),
        ("label smoothing", FAQ, "how-do-i-use-label-smoothing", "As a loss of your own"),
        ("context length extension rope scaling", FAQ, "how-do-i-extend",
         "`rope_parameters` is one"),
        ("how much data do I need to fine-tune", FAQ, "how-much-data",
         "about 1,000 good conversations"),
        ("multi gpu inference", FAQ, "does-weft-do-inference", "It has no server"),
        ("is async checkpointing supported", FAQ, "how-often-should-i-save",
         "Saving is asynchronous"),
        ("验证集显存爆了", FAQ, "cuda-out-of-memory-oom-only", "改为返回总和与个数"),
        ("数据集很小会过拟合吗", FAQ, "the-validation-loss", "死记样本"),
        ("学习率一开始设多少", FAQ, "which-learning-rate", "weft 没有查找功能"),
        ("微调需要多少数据", FAQ, "how-much-data", "约 1,000 条好的对话"),
        ("多卡推理", FAQ, "does-weft-do-inference", "没有推理服务"),
        ("怎么扩展上下文长度 rope", FAQ, "how-do-i-extend", "覆盖它的 `config.json`"),
        ("which rank for PowerSGD", "systems/compression", "what-it-does", "takes 645 steps"),
        ("fine-tune llama with chat template only loss on assistant", "fine_tuning",
         "conversations", "on the assistant's answers alone"),
        ("GPipe vs 1F1B memory, why does 1F1B use less activation memory", "systems/pipeline",
         "gpipe-vs-1f1b", "GPipe runs all forwards first"),
        ("does DiLoCo really converge as well as synchronous training", FAQ, "does-diloco",
         "reaches about the perplexity of synchronous training"),
        ("bandwidth between nodes, is 10 Gb ethernet enough for FSDP", FAQ, "do-i-need-nvlink",
         "10 Gbit/s is not enough for FSDP of 7B"),
        ("GPipe 和 1F1B 的显存，为什么 1F1B 激活值更少", "systems/pipeline",
         "gpipe-vs-1f1b", "GPipe 先做完所有前向"),
        ("DiLoCo 的收敛真的和同步训练一样好吗", FAQ, "does-diloco",
         "达到与同步训练差不多的困惑度"),
        ("节点之间 10 Gb 以太网跑 FSDP 够吗", FAQ, "do-i-need-nvlink",
         "10 Gbit/s 不够 7B 的 FSDP 用"),
        ("RuntimeError: Expected to have finished reduction in the prior iteration before starting "
         "a new one. find_unused_parameters", FAQ, "expected-to-have-finished",
         "walks the autograd graph after every forward"),
        ("is gradient accumulation equivalent to a larger batch", FAQ, "how-do-i-use-gradient",
         "divide each loss by the number of microbatches before"),
        ("where is tensor-model-parallel-size, how to set tp pp dp sizes", "layouts",
         "coming-from-megatron", "in weft you write `dp` out"),
        ("how do I save the sharded checkpoint back to safetensors for inference", FAQ,
         "how-do-i-export", "converts a sharded checkpoint of any layout"),
        ("RuntimeError: Expected to have finished reduction in the prior iteration 怎么办", FAQ,
         "expected-to-have-finished", "每次前向之后遍历一遍 autograd 图"),
        ("梯度累积和增大 batch size 等价吗", FAQ, "how-do-i-use-gradient",
         "把每次的损失除以微批次数"),
        ("tensor-model-parallel-size 在哪里设，tp pp dp 的大小怎么设", "layouts",
         "coming-from-megatron", "在 weft 中要写出 `dp`"),
        ("怎么把分片的检查点存回 safetensors 用于推理", FAQ, "how-do-i-export",
         "转换任何布局的分片检查点"),
        ("how do I resume on 4 GPUs from a checkpoint of 8", FAQ, "can-i-resume",
         "`--layout fsdp4 --resume`"),
        ("从 8 卡的检查点恢复到 4 卡继续训练", FAQ, "can-i-resume", "`--layout fsdp4 --resume`"),
        ("怎么自动选择并行策略", FAQ, "how-do-i-choose-the-parallelism", "第一行就是它的选择"),
        ("how do I choose the parallelism automatically", FAQ, "how-do-i-choose-the-parallelism",
         "`weft train` itself does not choose"),
        ("训练吞吐低,怎么看是通信慢还是数据加载慢", FAQ, "low-throughput", "rank 在等它的批次"),
        ("low throughput: is it communication or data loading", FAQ, "low-throughput",
         "the rank waits for its batch"),
        ("ValueError: Must flatten tensors with uniform dtype but got torch.bfloat16 and "
         "torch.float32", FAQ, "must-flatten", "makes one flat tensor of all, frozen ones too"),
        ("RuntimeError: Trying to backward through the graph a second time", FAQ,
         "trying-to-backward", "`state = state.detach()`"),
        ("AttributeError: Can't pickle local object spawn", FAQ, "cant-pickle",
         "Move it to the top of a module"),
        ("is FSDP mathematically the same as DDP, does it change the result", FAQ,
         "do-fsdp-and-ddp", "agree up to rounding"),
        ("can I use model.generate under FSDP", FAQ, "how-do-i-write-a-callback",
         "`synced_gpus=True`"),
        ("can I train on 3 GPUs, an odd number of GPUs", FAQ, "how-many-gpus-do-i-need",
         "need a batch that divides by 3"),
        ("tokenizers parallelism warning TOKENIZERS_PARALLELISM", FAQ, "where-is-text-tokenized",
         "`TOKENIZERS_PARALLELISM=false` in the environment"),
        ("what does warm-up in 1F1B mean", "systems/pipeline", "gpipe-vs-1f1b",
         "runs p - r forwards"),
        ("should gradients be reduced in bf16 or fp32", FAQ, "what-is-mixed-precision",
         "rounds each partial sum to 8 bits"),
        ("how do I reproduce a paper's hyperparameters with fewer GPUs", FAQ,
         "do-i-change-the-batch", "its global batch as `train.batch`"),
        ("how long does it take to send the gradients, bytes and bandwidth", FAQ, "how-many-bytes",
         "45 s at 10 Gbit/s"),
        ("RuntimeError: No backend type associated with device type cpu", "systems/start_up",
         "backends", "a collective got a tensor on the CPU"),
        ("FSDP 和 DDP 结果一样吗", FAQ, "do-fsdp-and-ddp", "在舍入误差之内一致"),
        ("重计算要多花多少时间", FAQ, "how-do-i-turn-on", "一步最多慢三分之一"),
        ("怎么计算通信时间", FAQ, "how-many-bytes", "时间 = 字节数 / 最慢链路的带宽"),
        ("3 张卡能训练吗 奇数张卡", FAQ, "how-many-gpus-do-i-need", "批次要能被 3 整除"),
        ("Trying to backward through the graph a second time 报错", FAQ, "trying-to-backward",
         "对同一部分做第二次反向就会失败"),
        ("Can't pickle local object 报错", FAQ, "cant-pickle", "移到模块的顶层"),
        ("1F1B 的预热是什么", "systems/pipeline", "gpipe-vs-1f1b", "先做 p - r 个前向"),
        ("梯度用 bf16 还是 fp32 归约", FAQ, "what-is-mixed-precision", "每个部分和都舍入到 8 位"),
        ("用更少的卡复现论文的超参数", FAQ, "do-i-change-the-batch", "就保持它的超参数"),
        ("FSDP 下能用 generate 生成样本吗", FAQ, "how-do-i-write-a-callback",
         "只在 rank 0 上调用会卡住"),
        # of a strict reader of the site, and terms of other tools
        ("CUDA out of memory on the first step, what can I change without touching my model?", FAQ,
         "cuda-out-of-memory-oom-or", "your model stays as it is"),
        ("why is my pipeline idle so much of the time", FAQ, "what-is-a-bubble",
         "all wait for the slowest stage"),
        ("loss is different on 4 GPUs than on 1 GPU", FAQ, "why-is-my-ddp-loss",
         "a mean of the ranks' means"),
        ("how do I continue training on a different number of GPUs", FAQ, "can-i-resume",
         "`--layout fsdp4 --resume`"),
        ("run with 2 nodes on slurm, what goes in the sbatch file", "clusters", "slurm",
         "#SBATCH --nodes=2"),
        ("why does row parallel linear need an all-reduce and column parallel not",
         "systems/tensor_parallel", "", "is only a partial sum, because"),
        ("can I train with workers connected over slow internet", FAQ, "can-i-train-over",
         "a method that exchanges seldom"),
        ("stale gradients in an async parameter server, does it still converge",
         "systems/parameter_server", "what-stale-gradients", "falls about as 1/s"),
        ("inner and outer optimizer DiLoCo which settings should I use", "local_sgd",
         "diloco-which-settings", "weft's defaults"),
        ("how does ring attention work", "systems/sequence_context", "ring-attention-by-hand",
         "online softmax"),
        ("which parallelism should I pick for 70B on 64 H100", FAQ, "how-many-gpus-do-i-need",
         "there begin with `fsdp64`"),
        ("what is error feedback and why do I need it with top-k", "systems/compression",
         "error-feedback-by-hand", "add up in the residual"),
        ("activation checkpointing only for some layers", FAQ, "how-do-i-turn-on",
         "only some layers, by name"),
        ("how do I write my own loss function so the mean is right with padding", "losses",
         "a-loss-of-your-own", "`output.numel()` would count it"),
        ("MFU and tokens per second, where do I see them", FAQ, "what-are-mfu",
         "A run prints no MFU"),
        ("torchtitan has HSDP with dp_replicate and dp_shard, how do I write this here",
         "systems/hybrids", "well-known-hybrids", "are `dp4.fsdp8` here"),
        ("显存不够怎么办", FAQ, "cuda-out-of-memory-oom-or", "不用改模型"),
        ("零气泡流水线是怎么做到没有气泡的", "systems/interleaved_zero_bubble", "",
         "气泡变小，但不为零"),
        ("数据集应该是什么格式，怎么接入自己的 Dataset", "data", "which-format",
         "与它的参数同名的条目"),
        ("dp_shard", "systems/hybrids", "well-known-hybrids", "`data_parallel_shard_degree = 8`"),
        ("sharding_strategy", "layouts", "fsdp1s-arguments", "`fsdp8`, `fsdp8+zero2`"),
        ("FULL_SHARD vs SHARD_GRAD_OP", "layouts", "fsdp1s-arguments", "`SHARD_GRAD_OP`"),
        ("HYBRID_SHARD", "systems/hybrids", "well-known-hybrids", "FSDP1's `HYBRID_SHARD`"),
        ("backward_prefetch", "layouts", "fsdp1s-arguments", "`[train] fsdp_prefetch`"),
        ("limit_all_gathers", "layouts", "fsdp1s-arguments", "each rank fills its own shards"),
        ("ZeRO++", "systems/zero", "", "which gathers weights in 8 bits"),
        ("ZeRO-Infinity", "systems/zero", "", "goes to host memory"),
        ("use-distributed-optimizer", "layouts", "coming-from-megatron", "in place of `dp8`"),
        ("async tensor parallel", "compile", "asynchronous-tensor", "async_tp"),
        ("DDP communication hook", "codecs", "", "`powerSGD_hook`"),
        ("1-bit Adam", FAQ, "which-optimizer-needs", "saves traffic, not memory"),
        ("sparsification", "systems/compression", "", "sparsification: `topk`"),
        ("async SGD", "systems/parameter_server", "asynchronous", "no bound"),
        ("TorchTrainer ScalingConfig", "clusters", "ray", "weft makes both"),
        ("load_best_model_at_end", FAQ, "how-do-i-keep-the-best", "keep_best = true"),
        ("save_total_limit", FAQ, "how-do-i-keep-the-best", "how many of the latest stay"),
        ("continue training with fewer GPUs", FAQ, "can-i-resume", "with fewer or more"),
        ("node failure", FAQ, "a-machine-fails", "goes on with three"),
        ("load balancing loss", FAQ, "how-do-i-balance", "adds a loss that evens out the load"),
        ("dropped tokens", FAQ, "how-do-i-balance", "no token is dropped"),
        ("silent corruption", "systems/fault_tolerance", "who-does-what", "is not found"),
        ("heterogeneous GPUs", FAQ, "do-i-need-nvlink", "the slowest sets the pace"),
        ("how many layers per stage", "pipelines", "where-a-model-is-split",
         "need not be divisible"),
        ("number of layers not divisible by pipeline stages", "pipelines",
         "where-a-model-is-split", "need not be divisible"),
        ("pin_memory", "data", "processes-that-read", "in pinned memory"),
        ("webdataset", FAQ, "my-dataset-does-not-fit", "all of them on every rank"),
        ("push to hub", FAQ, "how-do-i-export", "pushes it to the Hub"),
        ("contrastive learning large batch", "recipes", "images-and-texts", "whole_batch"),
        ("scaling efficiency", FAQ, "how-much-faster", "the speed-up over the growth"),
        ("linear scaling rule", FAQ, "do-i-change-the-batch", "the linear scaling rule"),
        ("what is distributed training", FAQ, "what-is-distributed", "several devices"),
        ("what is a process group", FAQ, "what-is-distributed", "the ranks that communicate"),
        ("where do I report a bug", FAQ, "where-do-i-report", "A wrong number is a bug"),
        ("how do I contribute", FAQ, "where-do-i-report", "which tests it needs"),
        ("爆显存", FAQ, "cuda-out-of-memory-oom-or", "不用改模型"),
        ("什么是分布式训练", FAQ, "what-is-distributed", "多个设备"),
        ("新手怎么入门", FAQ, "what-is-distributed", "第一次训练"),
        ("网速慢能训练吗", FAQ, "can-i-train-over", "很少交换的方法"),
        ("跨地域训练", FAQ, "can-i-train-over", "VPN"),
        ("异构显卡", FAQ, "do-i-need-nvlink", "以最慢的为准"),
        ("自定义数据集", "data", "which-format", "与它的参数同名的条目"),
        ("自定义损失", "losses", "a-loss-of-your-own", "返回均值"),
        ("合并权重", FAQ, "how-do-i-export", "合并其中的分片"),
        ("可视化", FAQ, "how-do-i-watch", "画进一个 HTML 文件"),
        ("监控训练", FAQ, "how-do-i-watch", "指标还写到哪里"),
        ("成本估算", FAQ, "how-long-will-training", "413 GPU 小时"),
        ("防火墙", FAQ, "address-already-in-use", "开放全部 TCP 端口"),
        ("主节点", FAQ, "address-already-in-use", "所有机器设成一样"),
        ("对比学习", "recipes", "images-and-texts", "whole_batch"),
        ("扩展效率", FAQ, "how-much-faster", "除以设备增加的倍数"),
        ("流水线空闲", FAQ, "what-is-a-bubble", "都要等最慢的阶段"),
        ("层数不能整除", "pipelines", "where-a-model-is-split", "层数不必能被阶段数整除"),
        ("会丢弃词元吗", FAQ, "how-do-i-balance", "不丢弃任何词元"),
        ("is it safe to open a checkpoint somebody else gave me", "security", "what-a-checkpoint",
         "loading one runs no code"),
        ("is it safe to run someone's config", "security", "what-a-run-file",
         "use `--no-code`"),
        ("is telemetry collected", "security", "what-listens-where", "sends no data anywhere else"),
        ("what is the difference between sequence parallel and context parallel", FAQ,
         "tensor-parallel-tp-or", "cuts the sequence between the layers"),
        ("how do I know if my network is the bottleneck", FAQ, "low-throughput",
         "it waits for sums of gradients"),
        ("can I use a custom training loop", "python", "a-training-loop", "one optimizer step"),
        ("how do I keep one layer replicated", "layouts", "parts-with-axes", '`"whole"`'),
        ("cuda error: an illegal memory access was encountered", FAQ, "cuda-error-device-side",
         "`compute-sanitizer`"),
        ("weights do not update", FAQ, "my-loss-does-not", "its gradients are None"),
        ("how do I gather predictions from all ranks", FAQ, "how-do-i-evaluate",
         "gathers the predictions of all ranks"),
        ("how do I evaluate a checkpoint only", FAQ, "how-do-i-evaluate",
         "No command evaluates only"),
        ("how do I validate my config", FAQ, "why-was-my-run", "nothing has started"),
        ("how do I do a dry run", FAQ, "why-was-my-run", "without training"),
        ("hydra or yaml config", FAQ, "where-is-a-list", "no Hydra config"),
        ("where are the logs", FAQ, "do-i-print", "in the run folder"),
        ("is weft faster than FSDP", FAQ, "why-weft", "as long as in plain torch"),
        ("catastrophic forgetting", FAQ, "how-do-i-train-with-lora", "forgets less"),
        ("how do I export to ONNX or GGUF", FAQ, "how-do-i-export", "llama.cpp"),
        ("how do I quantize a model after training", FAQ, "can-i-train-in-int8",
         "tool for serving quantize"),
        ("how do I add my own cluster", "planner", "your-own-hardware", "toml"),
        ("does verify need GPUs", FAQ, "how-do-i-check", "It needs no GPU"),
        ("how long does verify take", FAQ, "how-do-i-check", "in some seconds"),
        ("verify says a layer differs, which gradient is wrong", FAQ, "weft-verify-says",
         "first difference"),
        ("race condition deadlock", FAQ, "my-run-hangs", "the rank that is in no collective"),
        ("能用自己的训练循环吗", "python", "a-training-loop", "一个优化器步"),
        ("参数不更新", FAQ, "my-loss-does-not", "梯度是 None"),
        ("怎么只跑评估", FAQ, "how-do-i-evaluate", "没有只做评估的命令"),
        ("怎么判断是不是网络瓶颈", FAQ, "low-throughput", "在等它的批次"),
        ("verify 需要 GPU 吗", FAQ, "how-do-i-check", "不需要 GPU"),
        ("死锁怎么查", FAQ, "my-run-hangs", "不在集合通信中的那个 rank"),
        ("运行别人的配置安全吗", "security", "what-a-run-file", "`--no-code`"),
        ("怎么优雅地停止训练", FAQ, "how-do-i-pause", "保存检查点"),
        ("序列太长怎么办", FAQ, "how-do-i-train-on-long", "激活值"),
        ("what happens in a ring allreduce and how many bytes does each gpu send", FAQ,
         "how-many-bytes-does-each", "in N-1 turns each rank sends one part of S/N"),
        ("dropout gives different masks on each tp rank?", FAQ, "does-a-run-repeat",
         "draw their part of that one mask"),
        ("virtual pipeline stages / interleaving, how many microbatches do I need", "pipelines",
         "how-many-microbatches", "(p-1)/(vm+p-1)"),
        ("stages are unbalanced, last stage with the lm head is slow", FAQ, "pipeline-stages-are",
         "fewer blocks beside the head"),
        ("PowerSGD rank, how to choose", "systems/compression", "what-it-does-to-the-loss",
         "linear in the rank r"),
        ("clip_grad_norm when the parameters are sharded", FAQ, "does-gradient-clipping",
         "`model.clip_grad_norm_(1.0)`"),
        ("gloo pair.cc Connection closed by peer", FAQ, "connection-closed-by-peer",
         "another rank has gone"),
        ("gloo connectFullMesh failed", FAQ, "connection-closed-by-peer", "`GLOO_SOCKET_IFNAME`"),
        ("ncclRemoteError: A call failed possibly due to a network error or a remote process "
         "exiting prematurely", FAQ, "connection-closed-by-peer", "the rank that ended first"),
        ("RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn",
         FAQ, "element-0-of-tensors", "depends on no parameter that is trained"),
        ("migrate from Horovod", FAQ, "how-do-i-migrate-from-horovod",
         "`backward_passes_per_step`"),
        ("migrate from Axolotl or LLaMA-Factory yaml", FAQ, "how-do-i-migrate-from-horovod",
         "LLaMA-Factory, Axolotl"),
        ("how long does an all-reduce of 1 GB take over 10 GbE", "systems/collectives",
         "bytes-and-time", "0.8 s between two ranks"),
        ("GPipe vs 1F1B vs zero bubble, when", "systems/interleaved_zero_bubble",
         "when-to-use-which", "`gpipe` has the same bubble"),
        ("how much bandwidth does DiLoCo need", "systems/local_sgd", "how-to-choose-h",
         "4 Ψ / H bytes per step"),
        ("how much slower is float32 than bf16", FAQ, "how-much-faster-is-bf16",
         "312 TFLOP/s in bf16"),
        ("training is slower with more dataloader workers", FAQ, "is-data-loading-slow",
         "slow down training"),
        ("first epoch slow then fast", FAQ, "is-data-loading-slow", "the page cache"),
        ("environment variables in the run file", FAQ, "where-is-a-list",
         "no base file to inherit from"),
        ("include another toml or inherit a base config", FAQ, "where-is-a-list",
         "no base file to inherit from"),
        ("what is sync.name", "sync", "all-synchronisers", "| `allreduce` | every step |"),
        ("how do I set the optimizer in the run file", "optimizers", "which-optimizers",
         "`adafactor`"),
        ("training on two nodes is slower than on one", FAQ, "why-are-two-gpus",
         "10 to 100 times slower than NVLink"),
        ("activation checkpointing vs CPU offload which one first", FAQ, "how-do-i-offload",
         "comes first where activations"),
        ("libnccl.so undefined symbol", FAQ, "torch-not-compiled", "for another torch or CUDA"),
        ("DDP 的梯度桶是什么，大小怎么设", "systems/ddp", "gradient-buckets",
         "桶是一个展平的张量"),
        ("流水线各阶段负载不均衡", FAQ, "pipeline-stages-are", "少分到几个块"),
        ("张量并行时 dropout 的随机数一样吗", FAQ, "does-a-run-repeat", "取同样的掩码"),
        ("NCCL 报错 Connection closed by peer", FAQ, "connection-closed-by-peer",
         "另一个 rank 已经退出"),
        ("Horovod 怎么迁移", FAQ, "how-do-i-migrate-from-horovod", "`backward_passes_per_step`"),
        ("多机速度慢", FAQ, "why-are-two-gpus", "比 NVLink 慢 10 到 100 倍"),
        ("第一个 epoch 慢", FAQ, "is-data-loading-slow", "page cache"),
        ("FSDP 和张量并行一起用", "systems/hybrids", "well-known-hybrids", "`fsdp8.tp8+sequence`"),
        ("运行文件怎么写", FAQ, "where-is-a-list", "第一个运行文件怎么写"),
        ("DiLoCo 需要多少带宽", "systems/local_sgd", "how-to-choose-h", "平均每步是 4 Ψ / H 字节"),
        ("PowerSGD 的秩怎么选", "systems/compression", "what-it-does-to-the-loss", "逐次加倍"),
        ("why is the backward of tensor parallel the mirror of the forward, what are f and g in "
         "the Megatron paper", "systems/tensor_parallel", "why-the-backward-is-the-mirror",
         "the transpose of a sum is a copy"),
        ("split backward into input gradient and weight gradient, what does that buy me", FAQ,
         "why-split-the-backward", "`zb-h1` for 3 s (11.1 %)"),
        ("router load balancing loss in Mixtral, is it computed over the whole batch or per rank",
         FAQ, "how-do-i-balance-the-experts", "weft sums each expert's count of choices"),
        ("after local SGD averaging what happens to the Adam moments", FAQ,
         "after-local-sgd-averaging", "neither averaged nor sent nor reset"),
        ("use a different compressor inside the node and between nodes", "codecs",
         "a-different-compressor", "`[sync]` takes one codec"),
        ("1-bit / sign gradients, why do they diverge without the residual", FAQ,
         "why-do-1-bit-sign-gradients", "small elements arrive too large"),
        ("check that all nodes are healthy before I start a long job", FAQ,
         "are-all-nodes-healthy", "on each node with the same command"),
        ("DiLoCo 和 local SGD 有什么区别", FAQ, "what-is-the-difference-between-diloco",
         "区别在外层步"),
        ("RuntimeError: DataLoader worker is killed，多进程读数据怎么设置", FAQ,
         "dataloader-worker-is-killed", "主机内存用完了"),
    ]
]  # fmt: skip


# ---- the sections of the pages -------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A section of a page, without the sections below it."""

    page: str
    anchor: str  # the English one, which the Chinese page has on the site, too
    heading: str
    text: str

    def answers(self, question: Question) -> bool:
        return self.page == question.page and self.anchor.startswith(question.anchor)


def parts_of(pages: Path, chinese: bool) -> list[Part]:
    """All sections of the pages of one language."""
    found = []
    end = ".zh.md" if chinese else ".md"
    for path in sorted(pages.rglob(f"*{end}")):
        if chinese == path.name.endswith(".zh.md") and "reference" not in path.parts:
            page = path.relative_to(pages).as_posix().removesuffix(end)
            text = path.read_text(encoding="utf-8")
            english = stage.original_of(path).read_text(encoding="utf-8")
            code: list[str] = []
            bare = stage.FENCE.sub(lambda match, code=code: code.append(match[0]) or "\0", text)
            cut = re.split(r"^#+ (.+)$", bare, flags=re.MULTILINE)[1:]
            for anchor, heading, below in zip(stage.slugs(english), cut[::2], cut[1::2]):
                whole = re.sub("\0", lambda _, code=code: code.pop(0), below)
                found.append(Part(page, anchor, heading, " ".join(whole.split())))
    return found


# ---- a small search ------------------------------------------------------------------------------


def words(text: str) -> set[str]:
    """English words without the s of a plural, numbers, and pairs of Chinese characters."""
    latin = {word.removesuffix("s") for word in re.findall(r"[a-z0-9]+", text.lower())}
    runs = re.findall(r"[\u4e00-\u9fff]+", text)
    return latin | {run[at : at + 2] for run in runs for at in range(len(run) - 1)}


class Search:
    """Sections by the words of a question that they have: rare ones count more, those of a heading
    count three times."""

    def __init__(self, parts: list[Part]):
        self.parts = parts
        self.words = [(words(part.heading), words(part.text)) for part in parts]
        self.known = Counter(word for heads, body in self.words for word in heads | body)

    def hits(self, question: str) -> list[Part]:
        """The first sections, best first."""
        asked = words(question)
        weight = {w: math.log(len(self.parts) / self.known[w]) for w in asked if self.known[w]}

        def score(at: int) -> float:
            heads, body = self.words[at]
            return sum(weight[w] * (3 * (w in heads) + (w in body)) for w in weight)

        best = sorted(range(len(self.parts)), key=score, reverse=True)
        return [self.parts[at] for at in best[:FIRST]]


def unanswered(question: Question, hits: list[Part], parts: list[Part]) -> str:
    """Why a newcomer does not find the answer; nothing if the question leads there."""
    found = [part for part in parts if part.answers(question)]
    if not any(question.phrase in part.text for part in found):
        return f"{question.page}#{question.anchor} does not say {question.phrase!r}"
    if not any(part.answers(question) for part in hits):
        seen = ", ".join(f"{part.page}#{part.anchor}" for part in hits)
        return f"{question.text!r} leads to {seen}"
    return ""


@pytest.fixture(scope="module", params=[False, True], ids=["English", "Chinese"])
def language(request: pytest.FixtureRequest) -> tuple[list[Question], list[Part]]:
    chosen = [question for question in QUESTIONS if question.chinese == request.param]
    return chosen, parts_of(DOCS, request.param)


def test_every_question_leads_to_its_answer(language: tuple[list[Question], list[Part]]) -> None:
    questions, parts = language
    search = Search(parts)
    assert len(questions) > 20
    found = [unanswered(question, search.hits(question.text), parts) for question in questions]
    assert not [fault for fault in found if fault]


def test_a_lost_answer_is_seen(language: tuple[list[Question], list[Part]]) -> None:
    """One whose phrase is gone, and one whose words are."""
    questions, parts = language
    for question in questions[:2]:
        (place,) = [at for at, part in enumerate(parts) if part.answers(question)]
        part = parts[place]
        for heading, text in [
            (part.heading, part.text.replace(question.phrase, "")),
            ("Other", f"words {question.phrase}"),
        ]:
            changed = [*parts]
            changed[place] = Part(part.page, part.anchor, heading, text)
            assert unanswered(question, Search(changed).hits(question.text), changed)


# ---- the search of the site ----------------------------------------------------------------------

# Asks the worker that the page's own search asks, with what the page puts before it.
ASK = """
const [questions, done] = arguments;
const config = JSON.parse(document.querySelector("#__config").textContent);
const worker = new Worker(new URL(config.search, location));
const answer = (message) => new Promise((resolve) => {
  worker.addEventListener("message", (event) => resolve(event.data), { once: true });
  worker.postMessage(message);
});
(async () => {
  const base = new URL(config.base, location);
  const index = await (await fetch(new URL("search/search_index.json", base))).json();
  await answer({ type: 0, data: { ...index, options: { suggest: false } } });
  const found = [];
  for (const question of questions) {
    const { data } = await answer({ type: 2, data: question });
    found.push(data.items.map((page) =>
      [...page].sort((a, b) => b.score - a.score).map((section) => section.location)));
  }
  done(found);
})();
"""


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def hits_of_the_site(site: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[list[str]]]:
    """For each question, the sections found on a page of its language, by page, best first."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    found = {}
    try:
        with browser(tmp_path_factory.mktemp("browser")) as driver:
            driver.set_script_timeout(120)
            for chinese in (False, True):
                texts = [question.text for question in QUESTIONS if question.chinese == chinese]
                start = f"http://127.0.0.1:{server.server_port}/{'zh/' * chinese}index.html"
                driver.get(start)
                found |= dict(zip(texts, driver.execute_async_script(ASK, texts)))
    finally:
        server.shutdown()
    return [found[question.text] for question in QUESTIONS]


@pytest.mark.slow
def test_the_search_of_the_site_finds_the_answers(hits_of_the_site: list[list[list[str]]]) -> None:
    """Among the first pages, and there among the first sections."""
    missed = []
    for question, pages in zip(QUESTIONS, hits_of_the_site):
        start = f"{'zh/' * question.chinese}{question.page}.html"
        start += f"#{question.anchor}" if question.anchor else ""
        seen = [section for page in pages[:FIRST] for section in page[:FIRST]]
        if not any(section.startswith(start) for section in seen):
            missed.append(f"{question.text!r}: {start} is not among {seen}")
    assert not missed, "\n".join(missed)


@pytest.mark.slow
def test_a_page_finds_pages_of_its_own_language(hits_of_the_site: list[list[list[str]]]) -> None:
    for question, pages in zip(QUESTIONS, hits_of_the_site):
        found = [section for page in pages for section in page]
        assert found and all(each.startswith("zh/") == question.chinese for each in found)
