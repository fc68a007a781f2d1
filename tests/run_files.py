"""Run files that tests of several packages train."""

TINY = """
[model]
build = "weft.models:decoder"
dim = 16
heads = 2
layers = 1
seq_len = 16
[data]
build = "weft.data:stdlib"
seq_len = 16
max_bytes = 100000
[train]
batch = 8
steps = 2
threads = 1
[optimizer]
lr = 1e-3
"""

# what `weft verify --deep` trains: everything that a step may meet
TRAINED = """
[model]
build = "weft.models:decoder"
vocab = 31
dim = 8
layers = 2
heads = 2
hidden = 16
seq_len = 6
dropout = 0.1
[data]
build = "tests.verification.test_training_proof:Padded"
[layout]
axes = "dp2"
[train]
batch = 4
accumulate = 2
steps = 400
seed = 3
clip = 1.0
warmup = 60
decay = "cosine"
eval_every = 50
eval_batches = 3
skip = 5.0
[optimizer]
name = "adamw"
lr = 1e-2
"""
