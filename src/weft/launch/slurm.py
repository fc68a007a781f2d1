"""Writes a run as a SLURM job for sbatch.

The job's one step has one task on each host. SLURM sends SIGTERM to all processes of the step, and
not to the script: before the time limit because `--signal` asks for it, and when a job is preempted
in a partition that has a GraceTime. All tasks save and end with 75; srun ends with the highest code
of its tasks, and the script asks for another turn. Where hosts may be lost, newer versions' srun
ends with 1 once one was, whatever the others say; the job then has fewer hosts than it began with.
The first host takes the script along, and SLURM lets the job be: then the tasks of the others ask
for another turn, when they end for want of a place to meet.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from weft.core import ConfigError

from .job import SAVE_S, Job

LEAST_S = (
    SAVE_S + 180
)  # SLURM sends signals up to a minute early, and steps are to be taken between
HOST, PORT = "$host", "$port"

MEET = """\
export host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 20000)) # another for each job
export WEFT_TOKEN=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n') # hosts prove that they know it
"""

STATE = """\
state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T) # not RUNNING: cancelled
"""

STOPPED = """\
# 75: stopped by SIGTERM, and saved; 143: stopped before it began
if [[ ${state:-RUNNING} == RUNNING && ($code -eq 75 || $code -eq 143) ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
"""

LOST = """\
# Once a host was lost, srun's code may not be that of the others: the next turn goes on, or finds
# the run done.
left=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%D)
if [[ $code -ne 0 && ${left:-$SLURM_JOB_NUM_NODES} -lt $SLURM_JOB_NUM_NODES ]]; then code=75; fi
"""


# What each task is where hosts may be lost. It outlives SIGTERM, as weft does.
TASK = """\
bash -c 'trap : TERM
        "$@"
        code=$?
        case $code in 0 | 2) tries=0 ;; 75) tries=1 ;; *) tries=36 ;; esac # SLURM may see it late
        for ((; tries > 0; tries--)); do
            read -r state left < <(squeue --noheader --jobs="$SLURM_JOB_ID" --format="%T %N")
            if [[ $state == RUNNING && -n $left ]] &&
                ! scontrol show hostnames "$left" | grep -qx "$host"; then
                scontrol requeue "$SLURM_JOB_ID" # the first host is gone, and the script with it
                break
            fi
            ((tries == 1)) || sleep 10
        done
        exit $code' task"""


def slurm_script(
    job: Job,
    time: str | None = None,
    partition: str | None = None,
    account: str | None = None,
    gpus: int | None = None,
    cpus: int | None = None,
) -> str:
    """The text of a file for sbatch.

    Args:
        job: the run and its hosts.
        time: time limit, as SLURM writes it.
        partition: default: SLURM's.
        account: the account that pays.
        gpus: of each host.
        cpus: of each host; default: one per rank.

    Raises:
        ConfigError: what SLURM would not take.
    """
    job.check_gpus(gpus)
    for field, name in (("--partition", partition), ("--account", account)):
        if name is not None and not re.fullmatch(r"[\w.,@+-]+", name):
            raise ConfigError(
                field,
                name,
                "is not a name that SLURM accepts",
                "write a name without spaces or quotes",
            )
    if time is not None and slurm_seconds(time) < LEAST_S:
        problem = f"leaves no time to train: the run saves {SAVE_S} s before the end"
        raise ConfigError("--time", time, problem, f"ask for {LEAST_S // 60} minutes or more")
    options = {
        "job-name": re.sub(r"[^\w.-]+", "-", Path(job.path).stem),
        "nodes": job.hosts.replace(
            ":", "-"
        ),  # tasks per node are srun's: with them here SLURM gives the fewest nodes
        "cpus-per-task": cpus or job.ranks,
        "gpus-per-node": gpus,
        "time": time,
        "partition": partition,
        "account": account,
        "signal": f"TERM@{SAVE_S}",
        "open-mode": "append",
    }
    flags = ["requeue", *(["no-kill"] if job.elastic else [])]
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH --{name}={value}" for name, value in options.items() if value is not None),
            *(f"#SBATCH --{name}" for name in flags),
            "",
            MEET,
            f"{_srun(job)}\ncode=$?\n",
            f"{STATE}{LOST if job.elastic else ''}{STOPPED}exit $code\n",
        ]
    )


def _srun(job: Job) -> str:
    """The step. A task that ends ends no others: they are still saving, or go on without it."""
    lines = [
        (
            'srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1'
            ' --cpus-per-task="$SLURM_CPUS_PER_TASK"'
        ),
        "--kill-on-bad-exit=0 --wait=0" + (" --no-kill" if job.elastic else ""),
        *([TASK] if job.elastic else []),
    ]
    for word in job.command(job.hosts, f"{HOST}:{PORT}"):
        quoted = f'"{word}"' if word == f"{HOST}:{PORT}" else shlex.quote(word)
        if word == "weft" or word.startswith("--"):
            lines.append(quoted)
        else:
            lines[-1] += f" {quoted}"
    return " \\\n    ".join(lines)


def slurm_seconds(text: str) -> int:
    """Of a time as SLURM writes it: minutes, minutes:seconds, hours:minutes:seconds,
    days-hours[:minutes[:seconds]]. Raises ConfigError."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        raise ConfigError(
            "--time",
            text,
            "is not a time that SLURM accepts",
            "write 12:00:00, or 2-12 for two days and a half",
        )
    days, *parts = match.groups()
    numbers = [int(part) for part in parts if part is not None]
    units = (3600, 60, 1) if days is not None or len(numbers) == 3 else (60, 1)
    return 86400 * int(days or 0) + sum(
        unit * number for unit, number in zip(units, numbers, strict=False)
    )
