from .adamw8bit import AdamW8bit as AdamW8bit
from .collective_audit import Audit as Audit
from .comm_labels import COMM_PREFIX as COMM_PREFIX, CommLabels as CommLabels
from .compile_blocks import (
    CompileCounts as CompileCounts,
    CompiledBlocks as CompiledBlocks,
    check_compiled as check_compiled,
    resolve_compile as resolve_compile,
)
from .context_parallel.transformers_interfaces import eager_attention_by as eager_attention_by
from .context_parallel.whole_marks import whole_of as whole_of
from .draw_watch import draws_seeded as draws_seeded
from .engine import Engine as Engine
from .eval_metrics import check_metrics as check_metrics
from .float8_device import check_float8 as check_float8
from .float64_mode import Float64Mode as Float64Mode
from .forward_refusals import (
    refuse_what_does_not_run as refuse_what_does_not_run,
    refuse_without_attention as refuse_without_attention,
)
from .function_overrides import (
    BACKWARDS as BACKWARDS,
    OPENED_FUNCTIONS as OPENED_FUNCTIONS,
    FunctionOverrides as FunctionOverrides,
)
from .grad_buckets import local_tensor as local_tensor
from .lion import Lion as Lion
from .mixed_samples import SamplePair as SamplePair, mixing_error as mixing_error
from .muon import MuonWithAdamW as MuonWithAdamW
from .optimizer_factory import (
    OptimizerFactory as OptimizerFactory,
    known_optimizers as known_optimizers,
    make_optimizer as make_optimizer,
)
from .optimizer_trial import try_optimizer as try_optimizer
from .optimizers import (
    Optimizers as Optimizers,
    check_codec as check_codec,
    check_optimizer as check_optimizer,
    check_servers as check_servers,
    elementwise as elementwise,
    whole_tensors as whole_tensors,
)
from .own_gradients import find_own_gradient as find_own_gradient
from .pipeline.runner import Span as Span
from .pipeline.stage_compute import Loss as Loss
from .protocol import StepResult as StepResult, TrainingEngine as TrainingEngine
from .random_projection import RandomProjection as RandomProjection
from .replica_sync.async_parameter_server import UpdateOrder as UpdateOrder
from .replica_sync.async_servers import AsyncServerReplicas as AsyncServerReplicas
from .replica_sync.membership import (
    ReplicaGroup as ReplicaGroup,
    is_left_out as is_left_out,
    mark_ended as mark_ended,
)
from .replica_sync.outer_optimizer import message_params as message_params
from .rpc.calls import ModuleCalls as ModuleCalls
from .rpc.remote_engine import Remote as Remote, check_worker_plan as check_worker_plan
from .setup import check_offload_device as check_offload_device, own_device as own_device
from .training_modes import put_on_trial as put_on_trial, training_modes as training_modes
from .trial_functions import TrialFunctions as TrialFunctions
from .trial_run import first_tensor as first_tensor
from .weight_average import (
    WeightAverage as WeightAverage,
    averaged_name as averaged_name,
    check_average as check_average,
)
from .whole_batch import LazyBatch as LazyBatch
