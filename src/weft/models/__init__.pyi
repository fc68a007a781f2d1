from weft.nn import (
    convnet as convnet,
    decoder as decoder,
)
