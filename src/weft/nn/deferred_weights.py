"""Builds a model without its weights, which are drawn later, one at a time, for the shards that
need them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from sys import getrefcount
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from weft._torch.loading import load_elements
from weft._torch.modules import replace_buffers, replace_parameters, replace_references
from weft._torch.tensors import (
    FakeTensor,
    fake_mode,
    has_hooks,
    living_fakes,
    quiet_fake_tensors,
    user_attributes,
)
from weft._torch.trees import tree_leaves
from weft.core import LocalShard, UnsupportedModel

from .file_pieces import file_pieces, fill_from_files
from .init_recording import InitRecording
from .recorded_ops import StorageView
from .weight_files import file_tensors

Model = TypeVar("Model", bound=nn.Module)

_WEIGHTS = "_weft_initial_weights"


class DeferredWeights:
    """The initial weights of a model that `deferred_init` has built: those of the model built at
    once."""

    def __init__(self, recording: InitRecording, specs: Mapping[str, StorageView]):
        self._recording, self._specs = recording, specs

    def __deepcopy__(self, memo: dict[int, Any]) -> DeferredWeights:
        return self  # a copy of the model begins with the same weights

    def digest(self) -> tuple[bytes, bytes]:
        """Twice 32 bytes that are the same in two processes if the weights are: the second ones of
        what `computed_by` computed."""
        return self._recording.digest()

    @property
    def computed_by(self) -> tuple[str, ...]:
        """The operators whose results `build` read while it ran, as `linalg_lstsq`."""
        return tuple(dict.fromkeys(self._recording.computed.values()))

    def fill(self, shards: Iterable[LocalShard]) -> None:
        """Write initial values into these shards, in place. Draws all weights up to the last one
        needed, and holds one at a time; of a file it reads the bytes of the shards alone, unless
        the weight is computed from several tensors. Raises UnsupportedModel if a weight has another
        name or shape than when it was recorded, CheckpointError for a damaged file."""
        wanted: dict[int, list[tuple[StorageView, LocalShard]]] = {}
        for shard in shards:
            spec = self._specs.get(shard.name)
            if spec is None or spec.shape != tuple(shard.shape):
                found = "did not exist" if spec is None else f"was {spec.shape}"
                raise UnsupportedModel(
                    "model",
                    shard.name,
                    f"it {found} when the model was built by deferred_init",
                    "add and replace parameters inside of build",
                )
            pieces = file_pieces(self._recording, spec)
            if pieces is not None:
                fill_from_files(pieces, shard, spec.dtype)
            else:
                wanted.setdefault(spec.storage, []).append((spec, shard))
        for number, storage in self._recording.replay(wanted):
            for spec, shard in wanted[number]:
                whole = spec.view(storage)
                for local, position in shard.chunks:
                    shard.tensor[local] = whole[position].to(shard.tensor)
                del whole
            del storage  # before the next one is made


def deferred_init(
    build: Callable[..., Model], seed: int | None = 0, files: Sequence[str | Path] = ()
) -> Model:
    """Build a model without its weights: its parameters are on the meta device, its buffers as
    `build` makes them. `weft.Engine` then gives each rank its shards, and no process ever holds
    more than these and the largest weight or block.

    Weights are those that `build()` makes on one device, bit for bit, for any layout. What `build`
    does to tensors is recorded, and replayed when the shards are there; what cannot be is refused.
    Change weights inside of `build`, not after it.

    Args:
        build: () -> nn.Module; runs once, on tensors without elements. With `files`: (tensors) ->
            nn.Module, where `tensors` has those of the files by name, to be loaded as a state_dict.
        seed: seeds torch's generator before. None: its state as it is.
        files: safetensors that weights come from. Each rank reads the bytes of its shards alone.

    Raises:
        UnsupportedModel: what `build` does cannot be recorded, such as drawing on a GPU.
        CheckpointError: a file is damaged, or no safetensors.

    Example:
        model = weft.deferred_init(lambda: decoder(layers=32, dim=4096), seed=0)
        plan = weft.plan(model, "fsdp8", batch=64)
        engine = weft.Engine(model, plan, optimizer=optimizer, loss=weft.losses.next_token)
    """
    mode, stored = fake_mode(), file_tensors(map(Path, files))
    recording = InitRecording(mode)
    references = getrefcount(mode)
    with torch.random.fork_rng(devices=[]), quiet_fake_tensors():
        if seed is not None:
            torch.default_generator.manual_seed(seed)
        try:
            with load_elements(), mode, recording:
                tensors = {name: recording.add_stored(each) for name, each in stored.items()}
                model = build(tensors) if files else build()
                del tensors
        # Of operators, of the user, and of FakeTensors that two threads use at once.
        except (RuntimeError, TypeError, ValueError, AssertionError) as problem:
            reason = f"{type(problem).__name__}: {problem}".splitlines()[0]
            fix = "build it with its weights, without deferred_init: if that fails too, correct it"
            raise _refused(f"it fails on tensors without elements ({reason})", fix) from problem
        specs = _specs(recording, model)
        _take_elements(recording, model, {spec.storage for spec in specs.values()})
    recording.end()
    held = getrefcount(mode) > references  # each FakeTensor refers to its mode
    for tensor in living_fakes(mode) if held else ():
        raise _refused(
            f"it keeps a tensor {tuple(tensor.shape)} outside of its modules",
            "make it a buffer, or an attribute of a module",
        )
    vars(model)[_WEIGHTS] = DeferredWeights(recording, specs)
    return model


def _refused(problem: str, fix: str) -> UnsupportedModel:
    return UnsupportedModel("model", "build", f"cannot be recorded: {problem}", fix)


def initial_weights(model: nn.Module) -> DeferredWeights | None:
    """The weights that `deferred_init` left for later; None: the model has them already."""
    return vars(model).get(_WEIGHTS)


def forget_initial_weights(model: nn.Module) -> None:
    """The weights are there, and the record of how they are made is not needed any more."""
    vars(model).pop(_WEIGHTS, None)


def _specs(recording: InitRecording, model: nn.Module) -> dict[str, StorageView]:
    """Where each parameter's elements are, by all its names; then they are on the meta device."""
    specs, meta = {}, {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        specs[name] = recording.spec(parameter)
        recording.check_writes(parameter)
        if has_hooks(parameter):
            raise _refused(
                f"{name} has a hook", "register it on the model of weft.Engine (engine.model)"
            )
        if id(parameter) not in meta:
            empty = torch.empty_strided(
                parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta"
            )
            fresh = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            vars(fresh).update(user_attributes(parameter))
            meta[id(parameter)] = fresh
    for module in model.modules():
        replace_parameters(module, meta)
        replace_references(module, meta)
    return specs


def _take_elements(recording: InitRecording, model: nn.Module, weights: Collection[int]) -> None:
    """Give the model's buffers, and tensors among its attributes, their elements. `weights`: the
    storages of parameters."""
    held = [value for m in model.modules() for k, value in vars(m).items() if k != "_modules"]
    fakes = {id(t): t for t in tree_leaves(held, Tensor) if isinstance(t, FakeTensor)}
    specs = {key: recording.spec(t) for key, t in fakes.items()}
    for key, spec in specs.items():
        recording.check_writes(fakes[key])
        if spec.storage in weights:
            raise _refused(
                f"a tensor {spec.shape} of a module shares memory with a parameter",
                "make such views in forward",
            )
    real = {}
    for number, storage in recording.replay({spec.storage for spec in specs.values()}):
        for key, spec in specs.items():
            if spec.storage == number:
                real[key] = spec.view(storage)
                real[key].requires_grad_(fakes[key].requires_grad)
    for module in model.modules():
        replace_buffers(module, real)
        replace_references(module, real)
