from weft.engine import (
    AdamW8bit as AdamW8bit,
    Lion as Lion,
    MuonWithAdamW as MuonWithAdamW,
    elementwise as elementwise,
    known_optimizers as known_optimizers,
    make_optimizer as make_optimizer,
    whole_tensors as whole_tensors,
)
