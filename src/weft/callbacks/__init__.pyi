from weft.train import (
    Callback as Callback,
    Callbacks as Callbacks,
    Csv as Csv,
    EarlyStopping as EarlyStopping,
    Mlflow as Mlflow,
    TensorBoard as TensorBoard,
    Wandb as Wandb,
    WatchedRun as WatchedRun,
)
