from .collective_audit import Audit as Audit
from .context_parallel.sequence import check_padding as check_padding
from .engine import (
    ELEMENTWISE as ELEMENTWISE,
    Engine as Engine,
    Loss as Loss,
    Optimizers as Optimizers,
    StepResult as StepResult,
    check_codec as check_codec,
    named_inputs as named_inputs,
)
from .function_overrides import FunctionOverrides as FunctionOverrides
from .grad_buckets import local_tensor as local_tensor
from .pipeline.p2p import HEADER_BYTES as HEADER_BYTES
from .pipeline.runner import Span as Span
from .pipeline.stage_compute import model_arguments as model_arguments
from .replica_sync.membership import (
    ReplicaGroup as ReplicaGroup,
    is_left_out as is_left_out,
    mark_ended as mark_ended,
)
from .replica_sync.transports import request_traffic as request_traffic, wire_bytes as wire_bytes
from .rpc.calls import ModuleCalls as ModuleCalls
from .rpc.remote_engine import Remote as Remote, check_worker_plan as check_worker_plan
