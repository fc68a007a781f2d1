from .listing import describe_checkpoint as describe_checkpoint, listing_text as listing_text
from .store import (
    CHECKPOINTS as CHECKPOINTS,
    AsyncCheckpointer as AsyncCheckpointer,
    CheckpointIndex as CheckpointIndex,
    CheckpointReader as CheckpointReader,
    Retention as Retention,
    checkpoint_path as checkpoint_path,
    latest_step as latest_step,
    load_checkpoint as load_checkpoint,
    quarantine_latest as quarantine_latest,
    read_index as read_index,
    save_checkpoint as save_checkpoint,
)
