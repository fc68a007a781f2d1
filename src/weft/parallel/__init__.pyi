from .activation_offload import ActivationOffload as ActivationOffload
from .apply import parallelize as parallelize
from .axes import (
    DATA_AXES as DATA_AXES,
    EXPERT_AXES as EXPERT_AXES,
    FEATURE_AXES as FEATURE_AXES,
    HEAD_AXES as HEAD_AXES,
    KEY_AXES as KEY_AXES,
    SEQUENCE_AXES as SEQUENCE_AXES,
    SPREADING as SPREADING,
    STATE_AXES as STATE_AXES,
    TOKEN_AXES as TOKEN_AXES,
    VOCABULARY_AXES as VOCABULARY_AXES,
)
from .block_forward import (
    BlockForward as BlockForward,
    rerun_attention as rerun_attention,
    rerun_dropout as rerun_dropout,
    rerun_in_graph as rerun_in_graph,
    wrap_blocks as wrap_blocks,
)
from .collectives import (
    Crossing as Crossing,
    all_gather as all_gather,
    reduce_scatter as reduce_scatter,
    split_dim as split_dim,
)
from .comm_queries import dim_of_positions as dim_of_positions
from .direct_forward import (
    call_forwards_with_hooks as call_forwards_with_hooks,
    own_forward as own_forward,
    set_own_forward as set_own_forward,
)
from .draw_plan.rows import PlanRows as PlanRows, plan_rows as plan_rows
from .draw_plan.svg import plan_svg as plan_svg
from .draw_plan.text import plan_text as plan_text
from .expert_dispatch import ExpertCommStats as ExpertCommStats
from .gathered_units import choose_units as choose_units
from .host_copies import CudaCopies as CudaCopies
from .linear_products import (
    LinearProducts as LinearProducts,
    import_torchao as import_torchao,
    plain_product as plain_product,
)
from .low_precision import cast_arguments as cast_arguments, low_precision as low_precision
from .make_plan import (
    plan as plan,
    plan_from_request as plan_from_request,
    weights_of as weights_of,
)
from .mesh import Mesh as Mesh
from .operators_by_length import same_operators as same_operators
from .parts import find_parts as find_parts, roles_with_parts as roles_with_parts
from .plan_request import PlanRequest as PlanRequest
from .predict_comms import (
    STEP_STATISTICS as STEP_STATISTICS,
    AttentionCall as AttentionCall,
    BoundaryShape as BoundaryShape,
    CallSizes as CallSizes,
    Collective as Collective,
    GateQuery as GateQuery,
    RoutingCall as RoutingCall,
    SequenceInput as SequenceInput,
    collective_totals as collective_totals,
    predict_collectives as predict_collectives,
)
from .predict_grad_comms import chosen_weights as chosen_weights
from .recomputed_modules import recomputed_modules as recomputed_modules
from .sequence_checks import no_sequence as no_sequence
from .strategies import (
    allowed_options as allowed_options,
    axis_table as axis_table,
    axis_with_option as axis_with_option,
    registry as registry,
)
from .whole_batch import (
    plan_whole_batch as plan_whole_batch,
    whole_batch_comms as whole_batch_comms,
)
from .wire_sizes import (
    CHUNK_BYTES as CHUNK_BYTES,
    HEADER_BYTES as HEADER_BYTES,
    MAX_DIMS as MAX_DIMS,
    request_traffic as request_traffic,
    segment_bounds as segment_bounds,
    wire_bytes as wire_bytes,
)
