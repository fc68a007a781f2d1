from weft.train import (
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
