from weft.train import (
    Callback as Callback,
    Callbacks as Callbacks,
    EarlyStopping as EarlyStopping,
    WatchedRun as WatchedRun,
)
