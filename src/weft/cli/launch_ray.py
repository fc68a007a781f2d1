"""A run by Ray Train: each of Ray's workers is a rank.

Ray places the workers, watches them, and starts all of them anew when one has died. They meet in a
process group of weft's own, not in Ray's, and go on from weft's own latest checkpoint. Nothing here
imports Ray until a run is started.
"""

from __future__ import annotations

import os
import secrets
import socket
from functools import partial
from pathlib import Path
from typing import Any

from weft.checkpoint import CHECKPOINTS, latest_step
from weft.core import ConfigError, RunConfig, WeftError
from weft.launch import TOKEN, Backend, join_replica, join_world
from weft.train import check_output, replica_ranks, run_lock

from .train_run import train_and_compare

STORE = "ray"  # the folder of Ray's own notes, in the run's


def run_on_ray(run: RunConfig, resume: bool) -> None:
    """Train on the Ray cluster that RAY_ADDRESS names, else on one that runs on this host or is
    started here.

    Raises ConfigError if Ray is not installed, does not answer or has too little for the layout;
    WeftError if workers die more than [checkpoint] restarts times.
    """
    try:
        import ray
        import ray.train.torch
    except ImportError as error:
        raise ConfigError(
            "weft launch", "ray", f"needs {error.name}", 'install it: pip install "weft[ray]"'
        ) from None
    run = run.model_copy(
        update={"output": str(Path(run.output).resolve())}
    )  # workers are elsewhere
    with run_lock(run.output, make=not resume):
        check_output(run, resume)
        _run(run, ray)


def _run(run: RunConfig, ray: Any) -> None:
    """Train, as nobody else does in the run's folder."""
    from ray.train import FailureConfig, RunConfig as RayRunConfig, ScalingConfig, WorkerGroupError
    from ray.train.torch import TorchTrainer

    token = os.environ.get(TOKEN) or secrets.token_hex(16)
    try:
        ray.init()
    except (ConnectionError, ValueError) as error:
        at = os.environ.get("RAY_ADDRESS")
        raise ConfigError(
            "RAY_ADDRESS",
            at,
            f"no Ray cluster answers ({error})",
            "name one that runs, or unset it",
        ) from None
    try:
        needed = _worker_resources(run, ray.cluster_resources())
        backend: Backend = "nccl" if "GPU" in needed else "gloo"
        TorchTrainer(
            partial(_rank, run, backend, token),
            torch_config=_no_group(),
            scaling_config=ScalingConfig(
                num_workers=run.world, use_gpu="GPU" in needed, resources_per_worker=needed
            ),
            run_config=RayRunConfig(
                name=STORE,
                storage_path=run.output,
                failure_config=FailureConfig(max_failures=run.checkpoint.restarts),
            ),
        ).fit()
    except WorkerGroupError as error:
        # which came first Ray does not say; it has shown all of each
        said = [
            f"\nrank {rank}: {str(each).strip().splitlines()[-1]}"
            for rank, each in error.worker_failures.items()
        ]
        raise WeftError(f"workers died:{''.join(said)}") from None
    finally:
        ray.shutdown()


def _worker_resources(run: RunConfig, there: dict[str, float]) -> dict[str, float]:
    """What a worker asks Ray for: its threads, and a GPU if each can have one. Raises ConfigError
    if there are too few CPUs, for which Ray would wait."""
    world, threads = run.world, run.train.threads or 1
    if world * threads > there.get("CPU", 0):
        problem = (
            f"has {world} ranks of {threads} threads, and Ray has {there.get('CPU', 0):g} CPUs"
        )
        raise ConfigError(
            "layout.axes",
            str(run.layout.axes),
            problem,
            "use fewer ranks or train.threads, or more nodes",
        )
    asked, gpus = run.train.backend, there.get("GPU", 0)
    if asked not in ("auto", "gloo") and (run.workers or gpus < world):
        problem = (
            f"NCCL needs a GPU for each of {world} ranks, and the number of Ray's GPUs is {gpus:g}"
        )
        raise ConfigError("train.backend", asked, problem, 'use "gloo", or fewer ranks')
    on_gpus = asked != "gloo" and not run.workers and gpus >= world
    return {"CPU": threads, **({"GPU": 1} if on_gpus else {})}


def _no_group() -> Any:
    """Ray's settings for torch without a process group, but with every GPU of a node in sight of
    its ranks."""
    from ray.train.backend import Backend as RayBackend
    from ray.train.torch import TorchConfig

    class Bare(RayBackend):
        share_cuda_visible_devices = True

    class Config(TorchConfig):
        backend_cls = Bare

    return Config()


def _rank(run: RunConfig, backend: Backend, token: str) -> None:
    """What a worker does. `token`: by which workers of several nodes know one another."""
    import ray
    from ray.train.collective import broadcast_from_rank_zero

    context = ray.train.get_context()
    with socket.socket() as free:
        free.bind(("", 0))
        host, port = broadcast_from_rank_zero(
            (ray.util.get_node_ip_address(), free.getsockname()[1])
        )
    os.environ.update(
        RANK=str(context.get_world_rank()),
        WORLD_SIZE=str(context.get_world_size()),
        LOCAL_RANK=str(context.get_local_rank()),
        LOCAL_WORLD_SIZE=str(context.get_local_world_size()),
        MASTER_ADDR=host,
        MASTER_PORT=str(port),
        **{TOKEN: token},
    )
    worlds = replica_ranks(run)
    join = (
        join_replica(backend, run.train.threads, worlds, run.train.hang_s)
        if worlds
        else join_world(backend, run.train.threads, hang_s=run.train.hang_s)
    )
    resume = (
        latest_step(Path(run.output) / CHECKPOINTS) is not None
    )  # asked before any rank can save
    with join:
        train_and_compare(run, resume, again=True)
