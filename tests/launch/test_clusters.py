"""Runs on clusters: what is written for SLURM and Kubernetes, and what is done with it; a run by
Ray."""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import signal
import stat
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from typer.testing import CliRunner, Result

from tests.train.test_trainer import RUN, Ramps, curve, make, saved
from weft.cli.app import app
from weft.core.errors import ConfigError, LayoutError
from weft.launch import kubernetes, local_workers, slurm
from weft.launch.job import Job
from weft.train.trainer import train

AWKWARD = (
    "--set",
    'train.prompt=it\'s "$(date)" `id` $$HOME $(PET_NNODES) \\ ü\n#',
    "--output",
    "/data/my run",
)


def job(
    folder: Path, hosts: str = "2", axes: str = "dp4", given: tuple[str, ...] = (), **settings: Any
) -> Job:
    return Job.of("my runs/run.toml", make(folder, axes, **settings), hosts, given)


def weft(*words: object) -> Result:
    return CliRunner().invoke(app, ["launch", *map(str, words)], env={"COLUMNS": "100"})


# ---- hosts ---------------------------------------------------------------------------------------


def test_ranks_divide_over_the_most_hosts(tmp_path: Path) -> None:
    assert (job(tmp_path, "2:4", "dp2.tp4").ranks, job(tmp_path, "2", "dp2.tp4").ranks) == (2, 4)
    with pytest.raises(
        LayoutError,
        match=r"8 ranks, which do not divide over 3 hosts\. Use one of 1, 2, 4, 8 hosts",
    ):
        job(tmp_path, "2:3", "dp2.tp4")
    job(tmp_path).check_gpus(2)
    with pytest.raises(ConfigError, match="--gpus = 1: a host has 2 ranks of dp4"):
        job(tmp_path).check_gpus(1)


# ---- SLURM ---------------------------------------------------------------------------------------

SRUN = r"""#!/bin/bash
# One task for each node, all of them at once, and the highest code; or $LOST where a node was lost:
# as the real one.
echo "$@" > "$STUBS/srun"
[[ $LEFT != n2 ]] || kill -KILL $PPID # the script's own host is lost
while [[ $1 == --* ]]; do shift; done
for ((task = 0; task < SLURM_JOB_NUM_NODES; task++)); do
    SLURM_STEP_ID=0 SLURM_PROCID=$task SLURM_NTASKS=$SLURM_JOB_NUM_NODES "$@" & tasks+=($!)
done
for task in "${tasks[@]}"; do wait "$task"; code=$?; ((code > highest)) && highest=$code; done
touch "$STUBS/ended"
[[ $LEFT != "n1 n2" && -n $LOST ]] && exit "$LOST"
exit "${highest:-0}"
"""
SCONTROL = r"""#!/bin/bash
case "$*" in
"show hostnames "*) printf '%s\n' ${3//,/ } ;;
requeue*) echo "$2" >> "$STUBS/requeued" ;;
esac
"""
SQUEUE = r"""#!/bin/bash
left=($LEFT)
nodes=$(IFS=,; echo "${left[*]}")
[[ -z $LEFT ]] || case "$*" in
*%D) echo ${#left[@]} ;;
*"%T %N") echo "$STATE $nodes" ;;
*%T) echo "$STATE" ;;
esac
"""
WEFT = r"""#!/bin/bash
printf '%s\0' "$@" > "$STUBS/task-$SLURM_PROCID"
read -ra codes <<< "$CODES"
exit "${codes[$SLURM_PROCID]}"
"""


def ran(
    folder: Path,
    script: str,
    codes: str = "0 0",
    left: str = "n1 n2",
    lost: str = "1",
    state: str = "RUNNING",
) -> tuple[int, bool, list[str]]:
    """(exit code, whether it was requeued, what the first task was called with) of the script on
    two nodes, whose tasks end with these codes, and of which these are `left` at the end; `lost` is
    srun's code if one is not."""
    stubs = folder / "stubs"
    stubs.mkdir(parents=True)
    for name, text in {
        "srun": SRUN,
        "scontrol": SCONTROL,
        "squeue": SQUEUE,
        "weft": WEFT,
        "sleep": "#!/bin/bash\n",
    }.items():
        (folder / name).write_text(text)
        (folder / name).chmod(stat.S_IRWXU)
    (folder / "job.sh").write_text(script, encoding="utf-8")
    env = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "STUBS": str(stubs),
        "CODES": codes,
        "LEFT": left,
        "LOST": lost,
        "STATE": state,
    }
    env |= {"SLURM_JOB_ID": "70123", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n1,n2"}
    done = subprocess.run(
        ["bash", folder / "job.sh"], env=env | {"SLURM_CPUS_PER_TASK": "2"}, timeout=20
    )
    ended, requeued = stubs / "ended", stubs / "requeued"
    wait_for(ended.exists)  # srun may outlive the script
    assert len([*stubs.glob("task-*")]) == 2
    assert not requeued.exists() or set(requeued.read_text().split()) == {"70123"}
    return (
        done.returncode,
        requeued.exists(),
        (stubs / "task-0").read_text(encoding="utf-8").split("\0")[:-1],
    )


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def options(script: str) -> list[str]:
    return re.findall(r"^#SBATCH --(.*)$", script, re.M)


@pytest.mark.parametrize(
    ("hosts", "codes", "left", "code", "again"),
    [
        ("2", "75 75", "n1 n2", 75, True),
        ("2", "0 75", "n1 n2", 75, True),
        ("2", "0 0", "n1 n2", 0, False),
        ("2", "1 0", "n1 n2", 1, False),
        ("2", "2 2", "n1 n2", 2, False),
        ("2", "75 137", "n1 n2", 137, False),
        ("2", "143 143", "n1 n2", 143, True),  # before it began
        ("1:2", "75 75", "n1 n2", 75, True),
        ("1:2", "1 1", "n1 n2", 1, False),
        ("1:2", "0 0", "n1 n2", 0, False),
        ("1:2", "0 0", "n1", 75, True),  # srun says 1, whatever those that are left say
        ("1:2", "75 75", "n1", 75, True),
        ("1:2", "1 1", "n2", -signal.SIGKILL, True),  # the script's own host
        ("1:2", "75 75", "n2", -signal.SIGKILL, True),
        ("1:2", "0 0", "n2", -signal.SIGKILL, False),
        ("1:2", "2 2", "n2", -signal.SIGKILL, False),
        ("1:2", "1 1", "", 1, False),  # squeue does not answer
    ],
)
def test_a_job_that_was_stopped_goes_back_to_the_queue(
    tmp_path: Path, hosts: str, codes: str, left: str, code: int, again: bool
) -> None:
    assert ran(tmp_path / "bin", slurm.slurm_script(job(tmp_path, hosts)), codes, left)[:2] == (
        code,
        again,
    )


@pytest.mark.parametrize("hosts", ["2", "1:2"])
def test_a_job_that_is_cancelled_does_not_come_back(tmp_path: Path, hosts: str) -> None:
    script = slurm.slurm_script(job(tmp_path, hosts))
    for number, left in enumerate(("n1 n2", "n2")):
        assert not ran(tmp_path / f"bin{number}", script, "75 75", left, state="COMPLETING")[1]


@pytest.mark.parametrize(("codes", "again"), [("0 0", False), ("75 75", True)])
def test_where_srun_says_what_those_that_are_left_say_it_is_believed(
    tmp_path: Path, codes: str, again: bool
) -> None:
    text = slurm.slurm_script(job(tmp_path, "1:2"))
    assert ran(tmp_path / "bin", text, codes, "n1", lost="")[:2] == (
        int(codes[:2]),
        again,
    )  # SLURM 22.05


def test_a_job_runs_weft_once_on_each_host_with_what_it_was_given(tmp_path: Path) -> None:
    text = slurm.slurm_script(job(tmp_path, "1:2", given=AWKWARD))
    (tmp_path / "job.sh").write_text(text, encoding="utf-8")
    subprocess.run(["bash", "-n", tmp_path / "job.sh"], check=True)
    code, _, words = ran(tmp_path / "bin", text)
    assert code == 0
    where = ["--nodes", "1:2", "--rdzv", "n1:30123", "--nproc", "2", "--auto-resume"]
    assert words == ["train", "my runs/run.toml", *where, *AWKWARD]
    step = (tmp_path / "bin" / "stubs" / "srun").read_text().split(" bash ")[0].split()
    assert step == [
        *("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=2"),
        *("--kill-on-bad-exit=0", "--wait=0", "--no-kill"),
    ]


def test_a_job_says_what_it_needs(tmp_path: Path) -> None:
    asked = options(
        slurm.slurm_script(job(tmp_path, "2:4"), "1-12:00:00", "long", "me", gpus=1, cpus=8)
    )
    assert asked == [
        *(
            "job-name=run",
            "nodes=2-4",
            "cpus-per-task=8",
            "gpus-per-node=1",
            "time=1-12:00:00",
            "partition=long",
        ),
        *("account=me", "signal=TERM@120", "open-mode=append", "requeue", "no-kill"),
    ]
    assert options(slurm.slurm_script(job(tmp_path))) == [
        *(
            "job-name=run",
            "nodes=2",
            "cpus-per-task=2",
            "signal=TERM@120",
            "open-mode=append",
            "requeue",
        ),
    ]


def test_times_are_read_as_slurm_reads_them() -> None:
    read = {
        "90": 5400,
        "90:30": 5430,
        "12:00:01": 43201,
        "2-12": 216000,
        "1-1:30": 91800,
        "1-0:0:5": 86405,
    }
    assert {text: slurm.slurm_seconds(text) for text in read} == read
    for text in ("", "12h", "1:2:3:4", "1-", "-1", "1:"):
        with pytest.raises(ConfigError, match="is not a time that SLURM accepts"):
            slurm.slurm_seconds(text)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"time": "3"},
            (
                "--time = '3': leaves no time to train: the run saves 120 s before the end. Ask"
                " for 5 minutes"
            ),
        ),
        ({"partition": "a b"}, "--partition = 'a b': is not a name that SLURM accepts"),
        ({"account": "a\n#SBATCH"}, "is not a name that SLURM accepts"),
        ({"gpus": 1}, "--gpus = 1: a host has 2 ranks of dp4, and each needs its own GPU"),
    ],
)
def test_slurm_refuses(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        slurm.slurm_script(job(tmp_path), **given)


# ---- Kubernetes ----------------------------------------------------------------------------------

FULL: dict[str, Any] = {
    "image": "registry.example:5000/me/weft:1",
    "volumes": ["training:/data", "corpus:/corpus", "training:/more"],
    "name": "a-run",
    "namespace": "ml",
    "gpus": 2,
    "cpu": "500m",
    "memory": "64Gi",
}


def manifest(folder: Path, hosts: str = "2", given: tuple[str, ...] = (), **options: Any) -> Any:
    run = job(folder, hosts, given=given, output="/data/runs/run")
    return yaml.safe_load(
        kubernetes.kubernetes_manifest(
            run, **{"image": "weft:1", "volumes": ["training:/data"], **options}
        )
    )


def faults(value: Any, kind: str, at: str = "") -> Iterator[str]:
    """What is wrong with a value that should be of this kind, a name in the operator's client or
    that of Kubernetes."""
    from kubeflow.training import models
    from kubernetes import client

    plain = {"str": str, "int": int, "bool": bool}
    if match := re.fullmatch(r"list\[(.+)\]", kind):
        if not isinstance(value, list):
            yield f"{at}: no list"
            return
        for number, item in enumerate(value):
            yield from faults(item, match[1], f"{at}[{number}]")
    elif match := re.fullmatch(r"dict\(str, (.+)\)", kind):
        if not isinstance(value, dict):
            yield f"{at}: no table"
            return
        for key, item in value.items():
            yield from faults(item, match[1], f"{at}.{key}")
    elif kind in plain:
        if type(value) is not plain[kind]:
            yield f"{at}: {value!r} is no {kind}"
    else:
        model = getattr(models, kind, None) or getattr(client, kind)
        if not isinstance(value, dict):
            yield f"{at}: no table"
            return
        names = {written: name for name, written in model.attribute_map.items()}
        for key in value.keys() - names.keys():
            yield f"{at}.{key}: unknown"
        known = {key: item for key, item in value.items() if key in names}
        for key, item in known.items():
            yield from faults(item, model.openapi_types[names[key]], f"{at}.{key}")
        try:
            model(**{names[key]: item for key, item in known.items()})
        except ValueError as error:  # something is missing
            yield f"{at}: {error}"


@pytest.mark.parametrize("options", [FULL, {}])
def test_a_manifest_is_what_the_operator_takes(tmp_path: Path, options: dict[str, Any]) -> None:
    made = manifest(tmp_path, "1:2", **options)
    assert [*faults(made, "KubeflowOrgV1PyTorchJob")] == []
    assert (made["apiVersion"], made["kind"]) == ("kubeflow.org/v1", "PyTorchJob")


def test_a_manifest_that_the_operator_would_not_take_is_found_out(tmp_path: Path) -> None:
    def broken(*path: Any, **change: Any) -> list[str]:
        made = manifest(tmp_path, **FULL)
        node = made
        for key in path:
            node = node[key]
        node.update({key: value for key, value in change.items() if value is not None})
        for key in [key for key, value in change.items() if value is None]:
            del node[key]
        return [*faults(made, "KubeflowOrgV1PyTorchJob")]

    worker = ("spec", "pytorchReplicaSpecs", "Worker")
    pod = (*worker, "template", "spec")
    assert broken("spec", elasticpolicy={}) == [".spec.elasticpolicy: unknown"]
    assert broken("spec", nprocPerNode=2) == [".spec.nprocPerNode: 2 is no str"]
    assert broken("spec", "elasticPolicy", minReplicas="2") == [
        ".spec.elasticPolicy.minReplicas: '2' is no int"
    ]
    assert "run_policy" in broken("spec", runPolicy=None)[0]
    assert "name" in broken(*pod, "containers", 0, name=None)[0]
    assert "mount_path" in broken(*pod, "containers", 0, "volumeMounts", 0, mountPath=None)[0]
    assert broken(*pod, "containers", 0, command="weft train")[0].endswith("command: no list")
    assert broken(*pod, "containers", 0, "resources", "limits", cpu=8)[0].endswith(
        "limits.cpu: 8 is no str"
    )
    assert broken(*pod, restartpolicy="Never")[0].endswith("spec.restartpolicy: unknown")


def expanded(word: str, env: dict[str, str]) -> str:
    """As Kubernetes replaces $(NAME), where that is known, and $$."""
    return re.sub(
        r"\$(\$|\(([^()]*)\))", lambda m: "$" if m[1] == "$" else env.get(m[2], m[0]), word
    )


def test_a_pod_runs_what_was_given(tmp_path: Path) -> None:
    worker = manifest(tmp_path, "1:2", AWKWARD, **FULL)["spec"]["pytorchReplicaSpecs"]["Worker"]
    container = worker["template"]["spec"]["containers"][0]
    env = {
        "PET_NNODES": "1:2",
        "PET_RDZV_ENDPOINT": "a-run-worker-0:23456",
    }  # as the operator sets them
    where = ["--nodes", "1:2", "--rdzv", "a-run-worker-0:23456", "--nproc", "2", "--auto-resume"]
    assert [expanded(word, env) for word in container["command"]] == [
        *("weft", "train", "my runs/run.toml", *where, *AWKWARD)
    ]
    assert container["name"] == "pytorch"
    assert container["resources"] == {
        "limits": {"cpu": "500m", "memory": "64Gi", "nvidia.com/gpu": "2"}
    }
    assert (worker["replicas"], worker["restartPolicy"]) == (2, "OnFailure")


def test_pods_share_what_outlives_them(tmp_path: Path) -> None:
    pod = manifest(tmp_path, **FULL)["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    sources = {
        v["name"]: v.get("emptyDir") or v["persistentVolumeClaim"]["claimName"]
        for v in pod["volumes"]
    }
    seen = {
        mount["mountPath"]: sources[mount["name"]] for mount in pod["containers"][0]["volumeMounts"]
    }
    assert seen == {
        "/dev/shm": {"medium": "Memory"},
        "/data": "training",
        "/corpus": "corpus",
        "/more": "training",
    }
    assert len(sources) == 3


def test_hosts_and_restarts_are_the_runs(tmp_path: Path) -> None:
    spec = manifest(tmp_path, "1:2")["spec"]
    policy = {"rdzvBackend": "c10d", "minReplicas": 1, "maxReplicas": 2, "maxRestarts": 3}
    assert (spec["elasticPolicy"], spec["nprocPerNode"]) == (policy, "2")
    assert (manifest(tmp_path, "4")["spec"]["elasticPolicy"]["minReplicas"], spec["runPolicy"]) == (
        *(4, {"backoffLimit": 20}),
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"volumes": []},
            "would be lost with the pod. Add --output /data/run and --volume CLAIM:/data",
        ),
        ({"volumes": ["training:/else"]}, "would be lost with the pod. Add --output /else/run"),
        ({"volumes": ["training:/data/runs/run"]}, "would be lost with the pod"),
        ({"volumes": ["training"]}, "--volume = 'training': is not a claim with a path"),
        ({"volumes": ["training:data"]}, "is not a claim with a path"),
        ({"volumes": ["training:/data/../x"]}, "is not a claim with a path"),
        ({"volumes": ["a:/data", "b:/data"]}, "--volume = 'b:/data': something else lies at /data"),
        ({"image": "a b"}, "--image = 'a b': is not an image"),
        ({"name": "Run"}, "give a --name of at most 54 lower-case letters"),
        ({"name": "r" * 55}, "give a --name of at most 54 lower-case letters"),
        ({"namespace": "a/b"}, "--namespace = 'a/b': is not a namespace"),
        ({"cpu": "eight"}, "--cpu = 'eight': is not a quantity"),
        ({"memory": "64GB"}, "--memory = '64GB': is not a quantity"),
        ({"gpus": 1}, "--gpus = 1: a host has 2 ranks of dp4"),
    ],
)
def test_kubernetes_refuses(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"(?i){re.escape(said)}"):
        manifest(tmp_path, **given)


def test_any_text_is_read_back_from_yaml() -> None:
    draw = random.Random(0)
    letters = (
        "aZ09 -_.:/#'\"\\$(){}[],&*!|>%@`~=?\n\t\r\0\x07\x7f\x85\xa0é\u2028\u2029\ufeff\ufffe😀"
    )
    words = ["", "~", "1e3", "0x1f", "1:30", "a: b", "a #b", "- a", "--a", "---", "=", "<<"]
    words += ["yes", "No", "on", "OFF", "true", "False", "NULL"]
    words += ["".join(draw.choices(letters, k=draw.randrange(1, 7))) for _ in range(2000)]
    for word in words:
        assert yaml.safe_load(f"- a: {kubernetes.yaml_scalar(word)}\n  b: 1\n") == [
            {"a": word, "b": 1}
        ], repr(word)
    assert [kubernetes.yaml_scalar(word) for word in ("a/b.toml", "--nodes", "2:4", 3)] == [
        "a/b.toml",
        "--nodes",
        '"2:4"',
        "3",
    ]


# ---- the command line ----------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text(RUN)
    return tmp_path / "run.toml"


def test_files_are_written_for_a_run_that_has_passed_its_checks(file: Path) -> None:
    out = file.parent / "job.sh"
    asked = (
        "slurm",
        file,
        "--nodes",
        "1:2",
        "--layout",
        "dp2",
        "--set",
        "train.steps=7",
        "--out",
        out,
    )
    assert weft(*asked).exit_code == 0
    words = ran(file.parent / "bin", out.read_text())[2]
    assert words[-5:] == ["--auto-resume", "--layout", "dp2", "--set", "train.steps=7"]

    pods = weft(
        "kubernetes",
        file,
        "--nodes",
        2,
        "--layout",
        "dp4",
        "--image",
        "weft:1",
        "--volume",
        "a:/d",
        "--output",
        "/d/r",
    )
    assert pods.exit_code == 0
    assert yaml.safe_load(pods.stdout)["spec"]["nprocPerNode"] == "2"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--nodes", "1", "--layout", "tp3"), "weft: layout = 'tp3': "),
        (("--nodes", "3", "--layout", "dp4"), "weft: --nodes = '3': the run has 4 ranks"),
        (("--nodes", "0"), "weft: --nodes = '0': is not a number of hosts"),
        (("--nodes", "1", "--set", "data.build=none:here"), "weft: data.build = 'none:here': "),
    ],
)
def test_what_cannot_run_is_not_written(file: Path, words: tuple[str, ...], said: str) -> None:
    out = file.parent / "out"
    for way in (
        ("slurm",),
        ("kubernetes", "--image", "weft:1", "--volume", "a:/d", "--output", "/d/r"),
    ):
        result = weft(way[0], file, *words, *way[1:], "--out", out)
        assert (result.exit_code, out.exists()) == (2, False)
        assert said in result.output
    unwritable = weft("slurm", file, "--nodes", "1", "--out", file / "job.sh")
    assert unwritable.exit_code == 2
    assert "weft: --out = " in unwritable.output


# ---- Ray -----------------------------------------------------------------------------------------


class Killed(Ramps):
    """Rank 1 is killed when it has read 30 samples, once: where a file names a checkpoint, and when
    that is whole. The file then tells its inode."""

    def __init__(self, split: str = "train", file: str = ""):
        super().__init__(split)
        self.file = Path(file)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if (
            self.reads == 30
            and os.environ.get("RANK") == "1"
            and not (said := self.file.read_text()).isdigit()
        ):
            while not Path(said).exists():
                time.sleep(0.01)
            self.file.write_text(str(Path(said).stat().st_ino))
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_without_ray_a_run_by_ray_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    result = weft("ray", file)
    assert result.exit_code == 2
    assert (
        "weft: weft launch = 'ray': needs ray. Install it: pip install \"weft[ray]\"."
        in result.output
    )
    assert not (file.parent / "runs").exists()
    assert (
        "--workers = 3: layout dp2 has 2 ranks"
        in weft("ray", file, "--layout", "dp2", "--workers", 3).output
    )


def test_a_run_by_ray_takes_its_folder_for_itself(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from weft.train.run_lock import run_lock

    for name in ("ray", "ray.train", "ray.train.torch"):  # which is not reached
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["ray"].train = sys.modules["ray.train"]  # type: ignore[attr-defined]
    output = file.parent / "taken"

    def hold(ready: Any) -> None:
        with run_lock(str(output), make=True):
            ready.set()
            time.sleep(1000)

    context = multiprocessing.get_context("fork")
    ready = context.Event()
    holder = context.Process(target=hold, args=(ready,), daemon=True)
    holder.start()
    try:
        assert ready.wait(30)
        result = weft("ray", file, "--output", str(output))
    finally:
        holder.kill()
        holder.join()
    assert result.exit_code == 2 and "another run writes there" in result.output


def test_a_run_by_ray_goes_on_when_a_worker_has_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    from weft.cli import launch_ray

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # what Ray's workers import
    monkeypatch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    killer, kept = tmp_path / "kill", tmp_path / "ray" / "out" / "checkpoints" / "step-000003"
    killer.write_text("0")
    settings = {"data__build": "tests.launch.test_clusters:Killed", "data__file": str(killer)}
    settings |= {"train__steps": 9, "train__threads": 1}
    whole, killed = (make(tmp_path / name, "dp2", **settings) for name in ("whole", "ray"))
    local_workers.run_workers(train, 2, whole, False, threads=1)
    killer.write_text(str(kept))
    launch_ray.run_on_ray(killed, resume=False)
    assert killer.read_text() == str(kept.stat().st_ino)  # it was killed, and did not begin anew
    assert curve(killed) == curve(whole)
    here, there = saved(killed, 9), saved(whole, 9)
    assert here.keys() == there.keys()
    assert all(torch.equal(here[name], there[name]) for name in here)
    with pytest.raises(ConfigError, match="holds the checkpoints of a run"):
        launch_ray.run_on_ray(killed, resume=False)
