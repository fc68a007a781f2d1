from weft.train import (
    Chat as Chat,
    Dataset as Dataset,
    Images as Images,
    Loader as Loader,
    Text as Text,
    chat as chat,
    collate as collate,
    hf as hf,
    named_samples as named_samples,
    shapes as shapes,
    stdlib as stdlib,
    text as text,
)
