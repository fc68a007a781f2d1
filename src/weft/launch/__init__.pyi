from .choose_backend import Backend as Backend, backend_of_run as backend_of_run
from .doctor.allreduce_check import rate_text as rate_text
from .doctor.checks import DoctorRequest as DoctorRequest, RunChecks as RunChecks
from .doctor.findings import Finding as Finding, Host as Host
from .doctor.folder import CheckpointSize as CheckpointSize
from .doctor.machine import memory_finding as memory_finding
from .doctor.report import report_doctor as report_doctor
from .elastic_agent import HostsSpec as HostsSpec, run_host as run_host
from .environment import (
    AGENT as AGENT,
    launched_rank as launched_rank,
    local_world_size as local_world_size,
    note_error as note_error,
    restart_count as restart_count,
)
from .gate import TOKEN as TOKEN, ungated_error as ungated_error
from .job import Job as Job, write_job as write_job
from .kubernetes import kubernetes_manifest as kubernetes_manifest
from .launch_function import launch as launch
from .local_workers import (
    Pool as Pool,
    join_world as join_world,
    leave_world as leave_world,
    run_workers as run_workers,
    wait_as_spare as wait_as_spare,
)
from .log import log_line as log_line
from .rank_process import (
    follow_parent as follow_parent,
    rendezvous_store as rendezvous_store,
    replica_slot as replica_slot,
    usable_cores as usable_cores,
)
from .rendezvous import Rendezvous as Rendezvous, parse_nodes as parse_nodes
from .replica_workers import join_replica as join_replica, run_replicas as run_replicas
from .restarts import (
    quarantine_damaged as quarantine_damaged,
    run_with_restarts as run_with_restarts,
)
from .rpc import check_one_host as check_one_host, rpc_session as rpc_session
from .scratch_folder import ScratchFolder as ScratchFolder
from .signals import on_stop_signal as on_stop_signal
from .slurm import slurm_script as slurm_script
from .watchdog import (
    HANGS as HANGS,
    LEAST_S as LEAST_S,
    RARE_S as RARE_S,
    TIMES as TIMES,
    Watchdog as Watchdog,
)
