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
