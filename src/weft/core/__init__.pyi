from .action_costs import ActionCosts as ActionCosts, Number as Number
from .axis_traits import (
    ONE_AXIS_ALONE as ONE_AXIS_ALONE,
    AxisTable as AxisTable,
    AxisTraits as AxisTraits,
    Divides as Divides,
)
from .codec import (
    AllGatherRequest as AllGatherRequest,
    AllReduceRequest as AllReduceRequest,
    Codec as Codec,
    CodecState as CodecState,
    CommRequest as CommRequest,
    MessageCodec as MessageCodec,
    ReduceScatterRequest as ReduceScatterRequest,
    Reduction as Reduction,
    ReplicaView as ReplicaView,
    RequestSize as RequestSize,
    Shapes as Shapes,
    generator_of as generator_of,
    numel_of as numel_of,
)
from .compile_options import (
    CompileChoice as CompileChoice,
    CompileMode as CompileMode,
    CompileOptions as CompileOptions,
)
from .data_config import BlendConfig as BlendConfig, SourceConfig as SourceConfig
from .data_order import data_rank_indices as data_rank_indices, zigzag_spans as zigzag_spans
from .dropped_shapes import DroppedShapes as DroppedShapes, dims_of_samples as dims_of_samples
from .errors import (
    LINES as LINES,
    NO_CODE as NO_CODE,
    STOPPED as STOPPED,
    CheckpointError as CheckpointError,
    ConfigError as ConfigError,
    DamagedCheckpoint as DamagedCheckpoint,
    DataError as DataError,
    LayoutError as LayoutError,
    NeedsData as NeedsData,
    NothingToDivide as NothingToDivide,
    Refusal as Refusal,
    UnsupportedModel as UnsupportedModel,
    WeftError as WeftError,
    WorkerDied as WorkerDied,
    check_renamed as check_renamed,
    either as either,
    nearest as nearest,
    require as require,
    require_known as require_known,
)
from .faces import attach_face as attach_face
from .files import (
    MOST_TEXT_BYTES as MOST_TEXT_BYTES,
    append_file as append_file,
    check_regular as check_regular,
    printable as printable,
    read_file as read_file,
    replace_file as replace_file,
)
from .float8 import (
    MULTIPLE as MULTIPLE,
    OFF as OFF,
    RECIPES as RECIPES,
    Float8Linears as Float8Linears,
)
from .formula_text import fill_formula as fill_formula
from .grad_buckets import (
    GradBucket as GradBucket,
    bucket_gradients as bucket_gradients,
    gradient_owners as gradient_owners,
)
from .json_exchange import gather_json as gather_json
from .kept_imports import kept_imports as kept_imports
from .layout import (
    EXPERTS as EXPERTS,
    EXPERTS_OPTION as EXPERTS_OPTION,
    REPLICA_AXIS as REPLICA_AXIS,
    STAGE_AXIS as STAGE_AXIS,
    Layout as Layout,
)
from .module_names import glob_of_blocks as glob_of_blocks, is_inside as is_inside
from .number_format import short_number as short_number
from .optional_imports import import_extra as import_extra
from .outlier_filter import OutlierFilter as OutlierFilter
from .partials import function_of_partial as function_of_partial
from .parts import (
    Part as Part,
    PartAxes as PartAxes,
    field_of_part as field_of_part,
    line_of as line_of,
    parts_within as parts_within,
)
from .pipeline_request import PipelineRequest as PipelineRequest
from .plan import (
    Plan as Plan,
    emulate_float8 as emulate_float8,
    stage_runs_module as stage_runs_module,
)
from .precision import DTYPES as DTYPES, LOW as LOW, DtypeRule as DtypeRule
from .run_config import (
    LayoutConfig as LayoutConfig,
    PipelineConfig as PipelineConfig,
    PrecisionConfig as PrecisionConfig,
    RunConfig as RunConfig,
    SyncConfig as SyncConfig,
    load_run as load_run,
    table_keys as table_keys,
)
from .run_files import (
    EVENTS as EVENTS,
    METRICS as METRICS,
    PLAN as PLAN,
    PREDICTION as PREDICTION,
    PROFILE as PROFILE,
    RANKS as RANKS,
    RUN_FILE as RUN_FILE,
    TRACE as TRACE,
    TRACEBACK as TRACEBACK,
    VERIFIED as VERIFIED,
)
from .schedule import (
    CELL as CELL,
    DEFAULT_SCHEDULE as DEFAULT_SCHEDULE,
    Action as Action,
    Kind as Kind,
    Schedule as Schedule,
    Versions as Versions,
    from_csv as from_csv,
    peak_live as peak_live,
    to_csv as to_csv,
)
from .shards import (
    Chunk as Chunk,
    Index as Index,
    LocalShard as LocalShard,
    Segment as Segment,
    chunks_of as chunks_of,
    coverage_flaw as coverage_flaw,
    cut_segments as cut_segments,
    fsdp_rows as fsdp_rows,
    index_overlap as index_overlap,
    index_shape as index_shape,
    shift_index as shift_index,
    take_segments as take_segments,
    whole_shard as whole_shard,
)
from .stages import (
    InputRef as InputRef,
    OpaqueRef as OpaqueRef,
    ParamRef as ParamRef,
    PathNode as PathNode,
    Stage as Stage,
    Staging as Staging,
    TensorRef as TensorRef,
    Value as Value,
)
from .step import (
    COPY as COPY,
    SUM as SUM,
    ActivationSharding as ActivationSharding,
    Boundary as Boundary,
    DimShard as DimShard,
    ExpertDispatch as ExpertDispatch,
    FSDPUnit as FSDPUnit,
    Param as Param,
    Step as Step,
    Weight as Weight,
    collective as collective,
    computes_whole_sequences as computes_whole_sequences,
    sequence_step as sequence_step,
)
from .sync import (
    TIMEOUT_S as TIMEOUT_S,
    AsyncServers as AsyncServers,
    LocalSteps as LocalSteps,
    Route as Route,
    Sync as Sync,
    SyncEveryStep as SyncEveryStep,
    bucket_owners as bucket_owners,
)
from .text_table import text_table as text_table
from .timers import (
    CommTimer as CommTimer,
    time_once as time_once,
    typical_time as typical_time,
)
from .toml import (
    TomlTable as TomlTable,
    dump_toml as dump_toml,
    table_error as table_error,
    toml_refusal as toml_refusal,
)
from .train_config import BackendChoice as BackendChoice, TrainConfig as TrainConfig
from .translation import (
    ENGLISH as ENGLISH,
    choose_language as choose_language,
    language as language,
    languages as languages,
    translate as translate,
)
from .unit_choice import (
    BLOCKS as BLOCKS,
    UNIT_CHOICES as UNIT_CHOICES,
    WHOLE_MODEL as WHOLE_MODEL,
    UnitChoice as UnitChoice,
    parse_units as parse_units,
)
from .user_faults import fault_of as fault_of, told_fault as told_fault
from .value_exchange import broadcast_value as broadcast_value
from .version import __version__ as __version__
from .whole_updates import (
    WholeUpdate as WholeUpdate,
    block_segments as block_segments,
    cuts_blocks as cuts_blocks,
    stored_numel as stored_numel,
    stored_segments as stored_segments,
    whole_updates as whole_updates,
)
from .worker_placement import (
    DRIVER as DRIVER,
    WorkerPlacement as WorkerPlacement,
    place_modules as place_modules,
)
