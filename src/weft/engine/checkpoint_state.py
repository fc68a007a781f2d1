"""What a checkpoint holds of one rank: its shards of weights, buffers and optimizer state, by
global name."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from zlib import crc32

from torch import Tensor, nn

from weft.core import (
    COPY,
    REPLICA_AXIS,
    STAGE_AXIS,
    CodecState,
    LocalShard,
    Plan,
    Segment,
    block_segments,
    chunks_of,
    gradient_owners,
    stored_segments,
    whole_shard,
)
from weft.parallel import Mesh

from .grad_buckets import GradReducer, local_tensor
from .optimizers import state_blocks
from .param_update import ParamUpdate
from .replica_sync.bucket_exchange import FSDPReduceScatter
from .replica_sync.replicas import ReplicaSync


class CheckpointState:
    """One rank's part of a run. `plan`: of one replica; `global_plan`: of all. Set `update`,
    `reducer` and `scatters` once they are made."""

    update: ParamUpdate
    reducer: GradReducer
    scatters: Mapping[str, FSDPReduceScatter]

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        global_plan: Plan,
        mesh: Mesh,
        params: Mapping[str, nn.Parameter],
        replicas: ReplicaSync,
    ):
        self._model, self._plan, self._global_plan, self._mesh = model, plan, global_plan, mesh
        self._params, self._replicas = params, replicas
        self._owners, self.table = gradient_owners(plan), plan.params()
        self._weights = {w.name: w for w in plan.weights}
        # a checkpoint was of another layout or codec, so what codecs keep begins anew
        self.codec_state_lost = False

    # ---- whose is what ---------------------------------------------------------------------------

    @property
    def owned(self) -> bool:
        """Whether some replicas alone update parameters, for all."""
        return bool(self._owners)

    def updates(self, name: str) -> bool:
        """Whether this rank updates a parameter; otherwise the replica that owns it sends it."""
        own = self._mesh.coords.get(REPLICA_AXIS, 0)
        return self._owners.get(name, own) == own

    def holds(self, name: str) -> bool:
        """Whether this rank has a parameter, or its part."""
        return self._mesh.coords.get(STAGE_AXIS, 0) in self._plan.holders(name)

    def copies(self) -> dict[str, int]:
        """How many ranks hold each element of a parameter of this rank."""
        layout = self._plan.layout
        within = layout.world // layout.stage_ranks // (layout.replica_count if self._owners else 1)
        return {
            name: within
            * len(self._plan.holders(name))
            // layout.size(*(axis for axis, p in self.table[name].items() if p.stored != COPY))
            for name in self._params
        }

    def buffer_holders(self, name: str) -> tuple[int, ...]:
        """The positions on `pp` that keep a buffer; what no stage changes is kept by all."""
        staging, placement = self._plan.staging, self._plan.schedule.placement
        stages = (
            [s.index for s in staging.stages if name in s.buffers] if staging is not None else []
        )
        return tuple(sorted({placement[stage] for stage in stages or range(len(placement))}))

    def absent_buffers(self) -> set[str]:
        """Buffers that other stages keep."""
        position = self._mesh.coords.get(STAGE_AXIS, 0)
        names = (name for name, _ in self._model.named_buffers())
        return {name for name in names if position not in self.buffer_holders(name)}

    def segments(self, name: str) -> list[list[Segment]]:
        """Per dim of this rank's part of a parameter: where its rows lie in the global tensor."""
        plan, shape = self._plan, self._weights[name].shape
        return stored_segments(plan, shape, self.table[name], self._mesh.rank)

    # ---- tensors ---------------------------------------------------------------------------------

    def tensors(self, step: int, saved: Collection[str] | None = None) -> Iterator[LocalShard]:
        """This rank's part of each tensor after `step` steps. Storage is live.

        `saved`: the names that a checkpoint holds, to be loaded from it: optimizer state is made
        for these alone.
        """
        for name, p in self._params.items():
            yield self.shard(name, local_tensor(p.detach()), name)
        absent = self.absent_buffers()
        persistent = self._model.state_dict(keep_vars=True).keys() - self._params.keys()
        for name, buffer in self._model.named_buffers():
            if name in persistent and name not in absent:
                yield whole_shard(name, buffer, self._writes(self.buffer_holders(name), ()))
        for full, name, tensor in self._replicas.shards(step, saved):
            yield self.shard(full, tensor, name)
        for name, kept in self.codec_tensors():
            if saved is None or name in saved:
                yield whole_shard(name, kept, True)
        if saved is not None:
            self._note_lost_codec_state(saved)
            self.update.make_state(saved)
        yield from self._optimizer_tensors(saved is not None)

    def weights(self) -> Iterator[LocalShard]:
        """This rank's part of each weight, written by one rank of each replica. Storage is live."""
        for name, p in self._params.items():
            shard = self.shard(name, local_tensor(p.detach()), name)
            first = self._is_first(self._plan.holders(name), self._axes_of_shards(name))
            yield replace(shard, writer=first)

    def codec_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What codecs keep from step to step: this rank's, of use to the same layout and codec
        alone."""
        each = self._replicas.codec_states()
        if each is None:
            each = self.reducer.exchange.states if self.reducer.exchange else ()
        states: dict[str, CodecState] = {str(i): s for i, s in enumerate(each)}
        states |= {name or "root": scatter.state for name, scatter in self.scatters.items()}
        shapes = [
            (name, key, tuple(t.shape))
            for name, state in states.items()
            for key, t in state.items()
        ]
        plan = self._global_plan
        for name, key, _ in shapes:
            mark = crc32(repr((str(plan.layout), plan.sync, shapes)).encode())
            yield f"sync/{mark:08x}/{self._mesh.place}/{name}/{key}", states[name][key]

    def _note_lost_codec_state(self, saved: Collection[str]) -> None:
        kept = [name for name in saved if name.startswith("sync/")]
        had = {name for name in kept if name.split("/")[2] == str(self._mesh.place)}
        mine = {name for name, _ in self.codec_tensors()}
        self.codec_state_lost = had != mine and bool(kept)

    def _optimizer_tensors(self, loading: bool) -> Iterator[LocalShard]:
        for name, held in self.update.held.items():
            whole = name in self.update.whole  # the rank that updates it has it alone of its peers
            blocks = state_blocks(self.update.optimizer)
            for key in self.update.optimizer.state.get(held, {}):
                value = self.update.state_tensor(held, key, loading)
                if value is None:
                    continue
                full, owner = f"optimizer/{name}/{key}", self._owners.get(name, 0)
                if key in blocks and not whole:
                    yield self._block_shard(full, value, name, owner, blocks[key])
                elif value.ndim and value.shape == held.shape and not whole:
                    yield self.shard(full, value, name, owner)
                else:
                    cut = self._axes_of_shards(name) if whole else ()
                    writer = self._writes(self._plan.holders(name), cut, owner)
                    yield whole_shard(full, value, writer)

    def shard(self, full: str, tensor: Tensor, name: str, replica: int = 0) -> LocalShard:
        """This rank's part of the tensor `full`, which is sharded as the parameter `name` is."""
        writer = self._writes(self._plan.holders(name), self._axes_of_shards(name), replica)
        chunks = chunks_of(self.segments(name))
        return LocalShard(full, tensor, self._weights[name].shape, chunks, writer)

    def _block_shard(
        self, full: str, tensor: Tensor, name: str, replica: int, block: int
    ) -> LocalShard:
        """This rank's part of a tensor with one entry for each block of a parameter's last dim."""
        writer = self._writes(self._plan.holders(name), self._axes_of_shards(name), replica)
        *first, last = self._weights[name].shape
        chunks = chunks_of(block_segments(self.segments(name), block))
        return LocalShard(full, tensor, (*first, -(-last // block)), chunks, writer)

    def same_on_replicas(self, name: str) -> bool:
        """Whether the ranks of `dp` hold the same part of a parameter; experts may be sharded
        there."""
        return REPLICA_AXIS not in self._plan.layout.expand(*self._axes_of_shards(name))

    def _axes_of_shards(self, name: str) -> list[str]:
        return [axis for axis, p in self.table[name].items() if p.stored != COPY]

    def _writes(self, holders: Sequence[int], cut: Sequence[str], replica: int = 0) -> bool:
        return self._replicas.writes and self._is_first(holders, cut, replica)

    def _is_first(self, holders: Sequence[int], cut: Sequence[str], replica: int = 0) -> bool:
        """Whether this rank is the first of those that hold the same part of something, in this
        replica."""
        layout, coords = self._plan.layout, self._mesh.coords
        cut = layout.expand(*cut)
        copies = [
            axis for axis in layout.active_axes() if axis not in (*cut, STAGE_AXIS, REPLICA_AXIS)
        ]
        here = coords.get(STAGE_AXIS, 0) == holders[0]
        here &= REPLICA_AXIS in cut or coords.get(REPLICA_AXIS, 0) == replica
        return here and all(coords[axis] == 0 for axis in copies)
