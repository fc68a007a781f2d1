from weft.nn import (
    accepts_sharded_logits as accepts_sharded_logits,
    causal_lm as causal_lm,
    classification as classification,
    cross_entropy as cross_entropy,
    is_positionwise as is_positionwise,
    is_whole_batch as is_whole_batch,
    logits_of as logits_of,
    mse as mse,
    next_token as next_token,
    positionwise as positionwise,
    vocab_parallel as vocab_parallel,
    whole_batch as whole_batch,
)
