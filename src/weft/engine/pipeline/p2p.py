"""Messages between the ranks of a pipeline: ordered on each channel (source rank -> destination
rank), without tags.

Both ends derive the same list of a channel's messages from the schedule, in the order in which the
source sends them, and receives are posted in that order: what NCCL asks for. Each channel has a
group of its own, since what flows both ways between two ranks, or to several, must not queue up
behind each other. Sends are never waited for before they are known to be through; receives are
posted ahead, and waited for when an action needs them.

The first tensor of a kind is preceded by a header with its shape and dtype; after that both ends
remember them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from weft.core import CommTimer, UnsupportedModel
from weft.parallel import MAX_DIMS

AHEAD = 3  # receives posted and not yet taken, on each channel
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.complex32,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


_SENT_AS_THEY_ARE = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32}
)


class PipelineMessage(NamedTuple):
    """What crosses once: a value (F) or its gradient (B). `value`: its number among the routes."""

    kind: Literal["F", "B"]
    value: int
    microbatch: int


class IncomingMessage(NamedTuple):
    """A message of a channel. `taken`: how many messages of the channel back its source takes
    before it sends it."""

    message: PipelineMessage
    taken: int


class TensorSpec(NamedTuple):
    """What both ends know of a tensor that crosses."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        return cls(tensor.dtype, tuple(tensor.shape), tensor.requires_grad)

    def header(self) -> Tensor:
        """int64 [MAX_DIMS + 3]."""
        dims = [*self.shape, *[0] * (MAX_DIMS - len(self.shape))]
        return torch.tensor([DTYPES.index(self.dtype), self.requires_grad, len(self.shape), *dims])

    @classmethod
    def read(cls, header: Tensor) -> TensorSpec:
        dtype, requires_grad, ndim, *dims = header.tolist()
        return cls(DTYPES[dtype], tuple(dims[:ndim]), bool(requires_grad))

    def __str__(self) -> str:
        grad = " with gradient" if self.requires_grad else ""
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}{grad}"


@dataclass
class _Channel:
    """Receives from one rank, which is `peer` in `group`. `waiting`: messages that are not posted
    yet, in order."""

    group: dist.ProcessGroup
    peer: int
    waiting: deque[IncomingMessage] = field(default_factory=deque)
    header: tuple[dist.Work, Tensor] | None = None  # posted for the first message in `waiting`
    posted: dict[PipelineMessage, tuple[dist.Work | None, Tensor, int]] = field(
        default_factory=dict
    )


class _SentMessage(NamedTuple):
    work: dist.Work
    tensor: Tensor  # alive until the work is done
    number: int  # of its message in the channel


class PipelineTransport:
    """One rank's end of all its channels.

    `rank`: this one in the pipeline. `groups`: for each rank that messages go to or come from, two
    groups of that rank and this one: for messages to the higher of the two, and to the lower.
    Headers are CPU tensors: the groups need a backend for these beside that of `device`.
    `dynamic_shapes`: every value is preceded by a header. `messages` and `bytes` count what was
    sent.
    """

    def __init__(
        self,
        rank: int,
        groups: Mapping[int, tuple[dist.ProcessGroup, dist.ProcessGroup]],
        device: torch.device,
        dynamic_shapes: bool = False,
    ):
        self.device, self.dynamic_shapes = device, dynamic_shapes
        self.messages = self.bytes = 0
        self.clock = CommTimer()  # of waits for messages, as the host sees them
        self._specs: dict[tuple[int, Hashable], TensorSpec] = {}
        self._keys: list[Hashable] = []  # of each microbatch
        self._names: Sequence[str] = ()
        self._sent: dict[int, deque[_SentMessage]] = {}
        self._to: dict[int, tuple[dist.ProcessGroup, int]] = {}
        self._from: dict[int, _Channel] = {}
        for peer, (up, down) in groups.items():
            there, back = (up, down) if peer > rank else (down, up)
            self._sent[peer] = deque()
            self._to[peer] = there, int(peer > rank)
            self._from[peer] = _Channel(back, int(peer > rank))

    def begin(
        self,
        incoming: Mapping[int, Sequence[IncomingMessage]],
        names: Sequence[str],
        signatures: Sequence[Hashable],
        forward_only: bool,
    ) -> None:
        """A run begins. `incoming`: from each rank, in its order. `names`: of the values.
        `signatures`: of each microbatch, what its shapes follow from, equal on all ranks."""
        kinds: Sequence[Hashable] = signatures
        if self.dynamic_shapes:  # what is known of one microbatch says nothing of another
            self._specs.clear()
            kinds = range(len(signatures))
        self._keys = [(kind, forward_only) for kind in kinds]
        self._names = names
        for peer, messages in incoming.items():
            self._from[peer].waiting = deque(messages)
        self.post()

    def end(self) -> None:
        """A run ends: what was sent may change from here on."""
        for sent in self._sent.values():
            while sent:
                sent.popleft().work.wait()

    def has_gradient(self, value: int, microbatch: int) -> bool:
        """Whether a value that has crossed gets a gradient."""
        return self._specs[value, self._keys[microbatch]].requires_grad

    # ---- sending ---------------------------------------------------------------------------------

    def send(
        self, message: PipelineMessage, tensor: Tensor, peers: Sequence[tuple[int, int]]
    ) -> None:
        """Start sending a tensor. `peers`: (rank, the message's number in the channel to it).

        Raises UnsupportedModel for a value that is not as it was for the same signature, or that no
        header describes.
        """
        value, microbatch = message.value, message.microbatch
        if message.kind == "F":
            key, spec = (value, self._keys[microbatch]), TensorSpec.of(tensor)
            known = self._specs.get(key)
            if known is None:
                self._describe(key, spec, peers)
            elif known != spec:
                raise UnsupportedModel(
                    f"value {self._names[value]}",
                    str(spec),
                    f"is sent between stages, and was {known} before for inputs of the same shapes",
                    "cut before it is made, or use dynamic_shapes=True, which sends its shape every"
                    " time",
                )
        if tensor.numel():
            data = _wire(tensor.detach())
            for peer, number in peers:
                self._start(peer, data, number)

    def _describe(
        self, key: tuple[int, Hashable], spec: TensorSpec, peers: Sequence[tuple[int, int]]
    ) -> None:
        if len(spec.shape) > MAX_DIMS or spec.dtype not in DTYPES:
            raise UnsupportedModel(
                f"value {self._names[key[0]]}",
                str(spec),
                "is sent between stages, and a message's header cannot describe it",
                f"cut elsewhere, or make it a plain tensor of at most {MAX_DIMS} dimensions",
            )
        self._specs[key] = spec
        header = spec.header()
        for peer, number in peers:
            self._start(peer, header, number)

    def _start(self, peer: int, tensor: Tensor, number: int) -> None:
        group, to = self._to[peer]
        sent = self._sent[peer]
        while sent and sent[0].work.is_completed():
            sent.popleft()
        sent.append(_SentMessage(group.send([tensor], to, 0), tensor, number))
        self.messages += 1
        self.bytes += tensor.nbytes

    # ---- receiving -------------------------------------------------------------------------------

    def receive(self, message: PipelineMessage, peer: int) -> Tensor:
        """Wait for a message from a rank (on CUDA the stream waits, and not the host)."""
        channel = self._from[peer]
        while message not in channel.posted:
            self._post(channel, True)
        work, tensor, taken = channel.posted.pop(message)
        if work is not None:
            with self.clock.waiting():
                work.wait()
        sent = self._sent[peer]
        while sent and sent[0].number < taken:  # the peer has it: there is nothing to wait for
            sent.popleft()
        return tensor

    def post(self) -> None:
        """Post receives ahead, as far as their shapes are known."""
        for channel in self._from.values():
            while channel.waiting and len(channel.posted) < AHEAD and self._post(channel, False):
                pass

    def _post(self, channel: _Channel, now: bool) -> bool:
        """Post the next receive of a channel. False: its shape is not known yet; `now` waits for
        it."""
        message, taken = channel.waiting[0]
        key = message.value, self._keys[message.microbatch]
        spec = self._specs.get(key)
        if spec is None:
            if message.kind == "B":  # of a value that this rank has still to make
                return False
            if channel.header is None:
                header = torch.empty(MAX_DIMS + 3, dtype=torch.int64)
                channel.header = channel.group.recv([header], channel.peer, 0), header
            if not now:
                return False
            work, header = channel.header
            with self.clock.waiting():
                work.wait()
            spec = self._specs[key] = TensorSpec.read(header)
            channel.header = None
        channel.waiting.popleft()
        if message.kind == "F" or spec.requires_grad:
            tensor = torch.empty(spec.shape, dtype=spec.dtype, device=self.device)
            posted = (
                channel.group.recv([_wire(tensor)], channel.peer, 0) if tensor.numel() else None
            )
            channel.posted[message] = posted, tensor, taken
        return True


def _wire(tensor: Tensor) -> Tensor:
    """The tensor as every backend sends it: contiguous, and its storage as uint8 where not all know
    its dtype."""
    if tensor.dtype in _SENT_AS_THEY_ARE and tensor.is_contiguous() and not tensor.is_neg():
        return tensor
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
