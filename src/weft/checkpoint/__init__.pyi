from .async_save import AsyncCheckpointer as AsyncCheckpointer
from .engine_files import (
    describe_origin as describe_origin,
    fill_engine as fill_engine,
    load as load,
    order_scalars as order_scalars,
    save as save,
)
from .index import (
    CHECKPOINTS as CHECKPOINTS,
    CheckpointIndex as CheckpointIndex,
    checkpoint_path as checkpoint_path,
    latest_step as latest_step,
    quarantine_latest as quarantine_latest,
    read_index as read_index,
    saved_steps as saved_steps,
)
from .listing import describe_checkpoint as describe_checkpoint, listing_text as listing_text
from .reader import CheckpointReader as CheckpointReader, load_checkpoint as load_checkpoint
from .writer import Retention as Retention, save_checkpoint as save_checkpoint
