"""What blocks save for backward rests in the host's memory between forward and backward.

A block's saved tensors go through hooks (`torch.autograd.graph.saved_tensors_hooks`), which copy
each storage once. The device frees a block's storages when the block after the next begins, so it
holds those of two blocks; in backward the block before the one that runs is on its way back. Where
a block is computed again, what it saves is its input.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from weft._torch.tensors import StorageWeakRef, storage_id, version_of, without_function_modes

from .host_copies import AnyCopies

# bytes of a storage from which on it is copied: what PCIe moves in the time that a copy's start
# takes, about 10 us
SMALLEST = 256 * 1024


class _KeptStorage:
    """A storage of the forward: in the host's memory, and on the device as long as `here` is."""

    def __init__(self, original: Tensor, copies: AnyCopies):
        self.storage = StorageWeakRef(original.untyped_storage())  # no other gets its address
        self.version, self.changed = version_of(original), False
        # shares the count of changes, and not the graph
        self.original: Tensor | None = original.detach()
        empty = torch.empty(0, dtype=torch.uint8, device=original.device)
        self.here: Tensor | None = empty.set_(original.untyped_storage())  # type: ignore[call-overload]
        self.host = copies.start_out(self.here)

    def check(self) -> None:
        """Note a change of the original, which its copy may or may not have."""
        if self.original is not None and version_of(self.original) != self.version:
            self.changed = True


class _BlockCall:
    """One call of a block's forward. `before`: the call before it in the same forward."""

    def __init__(self, before: _BlockCall | None, key: Hashable):
        self.before, self.key = before, key
        self.done: Any = None  # when the host has all
        self._kept: dict[int, weakref.ref[_KeptStorage]] = {}

    def add(self, kept: _KeptStorage) -> None:
        self._kept[id(kept)] = weakref.ref(kept)

    def kept(self) -> list[_KeptStorage]:
        """Those that a backward is still to read."""
        return [kept for ref in self._kept.values() if (kept := ref()) is not None]


class _SavedView:
    """What autograd holds in the place of a saved tensor: a view of a kept storage."""

    def __init__(self, kept: _KeptStorage, call: _BlockCall, tensor: Tensor):
        self.kept, self.call, self.dtype = kept, call, tensor.dtype
        self._shape = tensor.storage_offset(), tensor.size(), tensor.stride()

    def tensor(self, held: Tensor) -> Tensor:
        """It, of a storage that is on the device."""
        empty = torch.empty(0, dtype=self.dtype, device=held.device)
        return empty.set_(held.untyped_storage(), *self._shape)  # type: ignore[call-overload]


class ActivationOffload:
    """Of one rank. `smallest`: bytes of a storage from which on it is copied.

    Parameters and buffers of a block stay, with all views of them: FSDP2 frees and gathers what it
    has gathered. So do tensors that are not on the device, and subclasses of Tensor.
    """

    def __init__(self, copies: AnyCopies, smallest: int = SMALLEST):
        self._copies, self._smallest = copies, smallest
        self._held: weakref.WeakValueDictionary[int, _KeptStorage] = weakref.WeakValueDictionary()
        self._ends: weakref.WeakValueDictionary[Hashable, _BlockCall] = (
            weakref.WeakValueDictionary()
        )
        self._key: Hashable = None
        self._last: _BlockCall | None = None  # in the forward that runs
        self._on_device: list[_BlockCall] = []  # whose originals have not been let go of
        self._current: _BlockCall | None = None  # in the backward that runs
        # what is on its way back, held until the device has waited for it
        self._ahead: tuple[Any, list[Tensor]] | None = None

    # ---- the order of a run ----------------------------------------------------------------------

    def begin_forward(self, key: Hashable) -> None:
        """`key`: of a stage and microbatch, whose backward comes with the same key."""
        self._key, self._last = key, None

    def begin_backward(self, key: Hashable) -> None:
        """Blocks of other forwards leave the device, and the last one of this comes back."""
        for call in [call for call in self._on_device if call.key != key]:
            self._release(call)
        last = self._ends.pop(key, None)
        if last is not None:
            with torch.no_grad():
                self._prefetch(last)

    @contextlib.contextmanager
    def block(self, module: nn.Module) -> Iterator[None]:
        """Around one forward of a block: what is saved inside is offloaded."""
        while len(self._on_device) > 1:
            self._release(self._on_device[0])
        call = self._last = self._ends[self._key] = _BlockCall(self._last, self._key)
        own = {storage_id(t) for t in (*module.parameters(), *module.buffers())}

        def pack(tensor: Tensor) -> Tensor | _SavedView:
            with without_function_modes(), torch.no_grad():
                return self._save(call, tensor) if self._moves(tensor, own) else tensor

        try:
            with saved_tensors_hooks(pack, self._unpack):
                yield
        finally:  # a stage that ends inside of a block leaves its forward there
            call.done = self._copies.mark_out()
            self._on_device.append(call)

    # ---- forward ---------------------------------------------------------------------------------

    def _moves(self, tensor: Tensor, own: set[int]) -> bool:
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
        if not plain or tensor.device != self._copies.device:
            return False
        if tensor.is_conj() or tensor.is_neg():  # a view of a storage would lose that
            return False
        key = storage_id(tensor)
        found = key >= 0 and key not in own  # below 0: of a transform of torch.func
        return found and tensor.untyped_storage().nbytes() >= self._smallest

    def _save(self, call: _BlockCall, tensor: Tensor) -> _SavedView:
        key = storage_id(tensor)
        kept = self._held.get(key)
        if kept is None or kept.version != version_of(tensor):
            kept = self._held[key] = _KeptStorage(tensor, self._copies)
        call.add(kept)
        return _SavedView(kept, call, tensor)

    def _release(self, call: _BlockCall) -> None:
        """Let go of a block's originals, once the host has them."""
        self._on_device.remove(call)
        kept = call.kept()
        if any(each.original is not None for each in kept):
            self._copies.wait(call.done)
        for each in kept:
            each.check()
            each.original = each.here = None

    # ---- backward --------------------------------------------------------------------------------

    def _unpack(self, saved: Tensor | _SavedView) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        with without_function_modes(), torch.no_grad():
            if saved.call is not self._current:
                self._enter(saved.call)
            kept = saved.kept
            if kept.here is None:
                self._fetch_now([kept], saved.call)
            kept.check()
            if kept.changed:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an"
                    f" inplace operation after a block saved it (version {kept.version})"
                )
            assert kept.here is not None
            return saved.tensor(kept.here)

    def _enter(self, call: _BlockCall) -> None:
        """Backward comes to a block: the one before it begins to come back, and the one after it
        leaves, if a further backward is still to read it."""
        left, self._current = self._current, call
        self._settle()
        self._fetch_now(_absent(call), call)
        stay = {id(kept) for kept in call.kept()}
        if call.before is not None:
            self._prefetch(call.before)
            stay |= {id(kept) for kept in call.before.kept()}
        if left is not None and left in self._on_device:
            self._release(left)
        for kept in left.kept() if left is not None else ():
            if id(kept) not in stay and kept.original is None:
                kept.here = None

    def _prefetch(self, call: _BlockCall) -> None:
        self._settle()
        absent = _absent(call)
        if absent:
            self._ahead = self._start_back(absent, call)

    def _settle(self) -> None:
        """What has been on its way back is there for what is computed from now on."""
        if self._ahead is not None:
            self._copies.wait(self._ahead[0])
            self._ahead = None

    def _fetch_now(self, absent: Sequence[_KeptStorage], call: _BlockCall) -> None:
        if absent:
            self._copies.wait(self._start_back(absent, call)[0])

    def _start_back(
        self, absent: Sequence[_KeptStorage], call: _BlockCall
    ) -> tuple[Any, list[Tensor]]:
        here, mark = self._copies.start_back([kept.host for kept in absent], call.done)
        for kept, tensor in zip(absent, here, strict=True):
            kept.here = tensor
        return mark, here


def _absent(call: _BlockCall) -> list[_KeptStorage]:
    return [kept for kept in call.kept() if kept.here is None]
