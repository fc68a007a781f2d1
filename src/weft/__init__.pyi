from . import (
    callbacks as callbacks,
    checkpoint as checkpoint,
    data as data,
    losses as losses,
    models as models,
    optimizers as optimizers,
    sync as sync,
)
from .core import Layout as Layout, Plan as Plan, __version__ as __version__
from .engine import Engine as Engine, Remote as Remote, StepResult as StepResult
from .launch import launch as launch
from .nn import deferred_init as deferred_init
from .parallel import plan as plan
from .verification import verify as verify
