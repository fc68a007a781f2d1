"""Writes a run as a PyTorchJob manifest of the Kubeflow training operator, v1.

The operator makes a pod for each host, and a new one for a pod that is gone. It tells each, in
PET_NNODES and PET_RDZV_ENDPOINT, how many there are and where they meet: at the first.
"""

from __future__ import annotations

import itertools
import json
import posixpath
import re
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from weft.core import ConfigError

from .gate import TOKEN
from .job import SAVE_S, Job

RETRIES = 10  # of a host's container, on average, before the job has failed
LABEL = r"[a-z]([a-z0-9-]*[a-z0-9])?"  # RFC 1035, as the operator asks of a job's name
LONGEST = 63  # of the names that the operator makes of it, of pods and services
QUANTITY = r"\d+(\.\d+)?(m|[kMGTPE]i?)?"


def kubernetes_manifest(
    job: Job,
    image: str,
    volumes: Sequence[str] = (),
    name: str | None = None,
    namespace: str | None = None,
    gpus: int | None = None,
    cpu: str | None = None,
    memory: str | None = None,
) -> str:
    """The YAML text of a PyTorchJob.

    Args:
        job: the run and its hosts.
        image: container image with weft and the run file.
        volumes: CLAIM:/path each; the run folder must be on one of them.
        name: the job's name; default: the run file's.
        namespace: default: kubectl's.
        gpus: of each host.
        cpu: of each host, as a Kubernetes quantity.
        memory: of each host, as a Kubernetes quantity.

    Raises:
        ConfigError: what Kubernetes would not take, or a run folder that would be lost.
    """
    job.check_gpus(gpus)
    claims = _claims(volumes)
    _check_output(job, list(claims))
    if not re.fullmatch(r"[\w.:/@-]+", image, re.ASCII):
        raise ConfigError(
            "--image", image, "is not an image", "write as in registry.example/me/weft:1"
        )
    if namespace is not None and not re.fullmatch(LABEL, namespace):
        raise ConfigError(
            "--namespace", namespace, "is not a namespace", "write lower-case letters, digits and -"
        )
    for field, quantity in (("--cpu", cpu), ("--memory", memory)):
        if quantity is not None and not re.fullmatch(QUANTITY, quantity):
            raise ConfigError(field, quantity, "is not a quantity", "write as in 8, 500m or 64Gi")
    limits = {"cpu": cpu, "memory": memory, "nvidia.com/gpu": None if gpus is None else str(gpus)}
    names = {
        claim: f"volume-{number}" for number, claim in enumerate(dict.fromkeys(claims.values()))
    }
    pod = {
        "terminationGracePeriodSeconds": SAVE_S,
        "containers": [
            {
                "# The operator asks for this name.": None,
                "name": "pytorch",
                "image": image,
                "command": _command(job),
                "# Hosts prove to one another that they know it.": None,
                "env": [{"name": TOKEN, "value": secrets.token_hex(16)}],
                "resources": {"limits": limits} if any(limits.values()) else None,
                "volumeMounts": [
                    {"name": "shm", "mountPath": "/dev/shm"},
                    *({"name": names[claim], "mountPath": path} for path, claim in claims.items()),
                ],
            }
        ],
        "volumes": [
            {
                "# Processes of a host exchange tensors here; the default is 64 MiB.": None,
                "name": "shm",
                "emptyDir": {"medium": "Memory"},
            },
            *(
                {"name": name, "persistentVolumeClaim": {"claimName": claim}}
                for claim, name in names.items()
            ),
        ],
    }
    worker = {
        "replicas": job.most,
        "# A stopped host exits with 75 after saving, one that lost the first host with 1.": None,
        "# Both must start again; the policy ExitCode would end the job below 128.": None,
        "restartPolicy": "OnFailure",
        "template": {"spec": pod},
    }
    spec = {
        "nprocPerNode": str(job.ranks),
        "elasticPolicy": {
            "rdzvBackend": "c10d",
            "minReplicas": job.least,
            "maxReplicas": job.most,
            "maxRestarts": job.run.checkpoint.restarts,
        },
        "runPolicy": {
            "# Restarts of containers, on all hosts together, after which the job has failed.": (
                None
            ),
            "backoffLimit": RETRIES * job.most,
        },
        "pytorchReplicaSpecs": {
            "# All hosts: an elastic job has no master.": None,
            "Worker": worker,
        },
    }
    whole = {
        "# kubectl apply -f FILE, where the Kubeflow training operator runs.": None,
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": _name(job, name), "namespace": namespace},
        "spec": spec,
    }
    return "".join(f"{line}\n" for line in _lines(whole))


def _command(job: Job) -> list[str]:
    """What a pod runs. Kubernetes replaces $(NAME), and $$ by $."""
    places = "$(PET_NNODES)", "$(PET_RDZV_ENDPOINT)"
    return [word if word in places else word.replace("$", "$$") for word in job.command(*places)]


def _claims(volumes: Sequence[str]) -> dict[str, str]:
    """Path in the pod -> claim that is mounted there."""
    claims: dict[str, str] = {}
    for volume in volumes:
        claim, _, path = volume.partition(":")
        fits = re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", claim) and re.fullmatch(
            r"/[^:]*[^:/]", path
        )
        if not fits or posixpath.normpath(path) != path:
            raise ConfigError(
                "--volume",
                volume,
                "is not a claim with a path",
                "write CLAIM:/path, as in training:/data",
            )
        if path in claims or path == "/dev/shm":
            raise ConfigError(
                "--volume", volume, f"something else lies at {path}", "mount it elsewhere"
            )
        claims[path] = claim
    return claims


def _check_output(job: Job, paths: Sequence[str]) -> None:
    """The run folder outlives the pods."""
    output = posixpath.normpath(job.run.output)
    if any(output != path and PurePosixPath(output).is_relative_to(path) for path in paths):
        return
    problem = "lies on no volume, and checkpoints would be lost with the pod"
    at = f"{paths[0] if paths else '/data'}/{PurePosixPath(output).name}"
    given = (
        ""
        if paths
        else " and --volume CLAIM:/data, a PersistentVolumeClaim that all hosts may write"
    )
    raise ConfigError("output", job.run.output, problem, f"add --output {at}{given}")


def _name(job: Job, given: str | None) -> str:
    name = (
        re.sub(r"[^a-z0-9]+", "-", Path(job.path).stem.lower()).strip("-")
        if given is None
        else given
    )
    longest = LONGEST - len(f"-worker-{job.most - 1}")
    if not re.fullmatch(LABEL, name) or len(name) > longest:
        fix = f"give a --name of at most {longest} lower-case letters, digits and -, a letter first"
        raise ConfigError("--name", name, "is not a name that Kubernetes accepts", fix)
    return name


# ---- YAML ----------------------------------------------------------------------------------------


def _lines(node: dict[str, Any] | list[Any], indent: str = "") -> Iterator[str]:
    """Of a table or a list. A key that begins with # is a comment; one whose value is None is left
    out."""
    if isinstance(node, list):
        for item in node:
            lines = (
                [*_lines(item, f"{indent}  ")]
                if isinstance(item, dict)
                else [f"{indent}  {yaml_scalar(item)}"]
            )
            notes = [*itertools.takewhile(lambda line: line.lstrip().startswith("#"), lines)]
            yield from (f"{indent}{note.lstrip()}" for note in notes)
            yield f"{indent}- {lines[len(notes)].lstrip()}"
            yield from lines[len(notes) + 1 :]
        return
    for key, value in node.items():
        if key.startswith("#"):
            yield f"{indent}{key}"
        elif isinstance(value, dict | list):
            yield f"{indent}{yaml_scalar(key)}:"
            yield from _lines(value, f"{indent}  ")
        elif value is not None:
            yield f"{indent}{yaml_scalar(key)}: {yaml_scalar(value)}"


def yaml_scalar(value: str | int) -> str:
    """As YAML: bare where that can be nothing but this text, else in double quotes, whose escapes
    are JSON's."""
    if isinstance(value, int):
        return str(value)
    bare = re.fullmatch(r"(--)?[a-zA-Z/][\w./-]*([:=@][\w./-]+)*", value, re.ASCII)
    if bare and value.lower() not in ("y", "n", "yes", "no", "on", "off", "true", "false", "null"):
        return value
    quoted = json.dumps(value, ensure_ascii=False)
    return re.sub(
        r"[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]",
        lambda match: f"\\u{ord(match[0]):04x}",
        quoted,
    )
