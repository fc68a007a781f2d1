from .best_checkpoint import best_step as best_step
from .blend import Blend as Blend
from .build import (
    build_callbacks as build_callbacks,
    build_deferred as build_deferred,
    build_eval_metrics as build_eval_metrics,
    build_loss as build_loss,
    build_lr_factor as build_lr_factor,
    build_model as build_model,
    build_optimizer as build_optimizer,
    build_plan as build_plan,
    build_skeleton as build_skeleton,
    build_sync as build_sync,
    in_dtype as in_dtype,
    model_inputs as model_inputs,
    on_own_layout as on_own_layout,
    replica_ranks as replica_ranks,
    server_replicas as server_replicas,
    with_layout as with_layout,
)
from .build_data import (
    build_collate as build_collate,
    build_dataset as build_dataset,
    count_steps as count_steps,
    sample_batch as sample_batch,
)
from .callbacks import (
    Callback as Callback,
    Callbacks as Callbacks,
    EarlyStopping as EarlyStopping,
    WatchedRun as WatchedRun,
)
from .conversations import Chat as Chat, chat as chat
from .data import (
    Dataset as Dataset,
    Images as Images,
    Loader as Loader,
    Text as Text,
    collate as collate,
    hf as hf,
    shapes as shapes,
    stdlib as stdlib,
    text as text,
)
from .elastic_layout import shrink_to as shrink_to
from .hf_checkpoint import (
    DTYPES as DTYPES,
    export_weights as export_weights,
    import_weights as import_weights,
)
from .loggers import (
    Csv as Csv,
    Mlflow as Mlflow,
    TensorBoard as TensorBoard,
    Wandb as Wandb,
)
from .lr_schedule import tried_steps as tried_steps
from .megatron_files import MappedTokens as MappedTokens, megatron as megatron
from .metrics import (
    highest_over_ranks as highest_over_ranks,
    peak_memory_bytes as peak_memory_bytes,
)
from .named_callables import resolve_callable as resolve_callable
from .overlap.profiled_step import (
    ProfiledStep as ProfiledStep,
    last_step as last_step,
    own_tracks as own_tracks,
    read_profile as read_profile,
    tracks_json as tracks_json,
)
from .overlap.svg import overlap_svg as overlap_svg
from .overlap.text import overlap_text as overlap_text
from .run_checks import (
    check_device as check_device,
    check_run as check_run,
    check_sizes as check_sizes,
    plan_without_weights as plan_without_weights,
)
from .run_events import RunEvents as RunEvents
from .run_folder import check_output as check_output
from .run_lock import run_lock as run_lock
from .sample_stream import Stream as Stream
from .samples import named_samples as named_samples
from .stream_loader import (
    AnyLoader as AnyLoader,
    StreamLoader as StreamLoader,
    make_loader as make_loader,
    shuffled_places as shuffled_places,
)
from .token_stream import TokenStream as TokenStream, stream as stream
from .tokenizer import train_bpe as train_bpe
from .trainer import train as train
