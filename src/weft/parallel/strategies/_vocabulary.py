"""Rows of the embedding and of the head on the ranks of one axis; any vocabulary, the last ranks
getting less (Megatron-LM, Shoeybi et al. 2019). tensor.py and vocabulary.py cut by it."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.distributed.tensor import Shard

from weft.core import COPY, SUM, Boundary, DimShard, Param, Step, UnsupportedModel

from ._request import StepsRequest


def vocabulary_steps(request: StepsRequest, axis: str, by: str) -> Iterator[Step]:
    """One Step for each embedding and head.

    Raises:
        UnsupportedModel: An embedding needs its whole table, or has fewer rows than ranks.
    """
    roles, layout, names = request.roles, request.layout, request.names
    for module in (*roles.embeddings, *roles.heads):
        name = names[f"{module}.weight"]
        vocab = request.shapes[name][0]
        table = request.model.get_submodule(module)
        if isinstance(table, nn.Embedding) and (
            table.max_norm is not None or table.scale_grad_by_freq
        ):
            raise UnsupportedModel(
                f"roles.{module}",
                "embedding",
                "max_norm and scale_grad_by_freq need the whole table",
                'declare it "whole" in [roles]',
            )
        if vocab < layout.size(axis):
            raise UnsupportedModel(
                "layout",
                str(layout),
                f"{module} has {vocab} rows",
                f"use a {axis} size of at most that number of rows",
            )
        cut = DimShard(0, (vocab,), (vocab,))
        params = [
            Param(names[f"{module}.{leaf}"], axis, Shard(0), Shard(0), Shard(0), cut)
            for leaf, _ in table.named_parameters(recurse=False)  # biases and scales of tokens too
        ]
        if module in roles.embeddings:
            yield Step(module, by, tuple(params), output=Boundary({axis: COPY}, {axis: SUM}))
        else:
            out = Shard(-1) if request.sharded_logits else COPY
            yield Step(
                module,
                by,
                tuple(params),
                input=Boundary({axis: COPY}, {axis: COPY}),
                output=Boundary({axis: out}, {axis: Shard(-1)}, typed=request.sharded_logits),
            )
