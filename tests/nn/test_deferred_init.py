"""Weights drawn later are those of an ordinary build, bit for bit, whole or in part."""

import random
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy
import pytest
import torch
from torch import nn

from weft.core import ConfigError, LocalShard, UnsupportedModel, whole_shard
from weft.engine.initial_weights import move_to
from weft.models import convnet, decoder
from weft.nn import deferred_init, initial_weights, recorded_ops


def filled(model):
    """Name -> whole tensor, of the parameters of a model without weights."""
    shards = [
        whole_shard(n, torch.empty(p.shape, dtype=p.dtype)) for n, p in model.named_parameters()
    ]
    initial_weights(model).fill(shards)
    return {shard.name: shard.tensor for shard in shards}


def assert_same(build, seed=0):
    """Both ways of building give the same weights, buffers and attributes."""
    torch.manual_seed(seed)
    whole = build()
    model = deferred_init(build, seed)
    assert all(p.is_meta for p in model.parameters())
    found = filled(model)
    assert [*found] == [name for name, _ in whole.named_parameters()]
    for name, p in whole.named_parameters():
        assert torch.equal(found[name], p), name
        assert (
            found[name].dtype == p.dtype
            and p.requires_grad == model.get_parameter(name).requires_grad
        )
    for (name, b), (_, other) in zip(whole.named_buffers(), model.named_buffers(), strict=True):
        assert torch.equal(b, other), name
    return model


class Odd(nn.Module):
    """What people write in constructors."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        nn.init.trunc_normal_(self.first.weight, std=0.02)
        nn.init.orthogonal_(self.first.weight[:4])
        self.rates = [x.item() for x in torch.linspace(0, 0.1, 3)]
        scale = torch.randn(8)
        if scale.sum() > 0:  # reads elements
            self.more = nn.Linear(2, 2)
        self.scale = nn.Parameter(scale.abs() + 1)
        table = torch.from_numpy(numpy.arange(12, dtype=numpy.float32).reshape(3, 4)).clone()
        table[:, 1] = torch.tensor([5.0, 6.0, 7.0])
        self.register_buffer("table", table)
        self.kept = {"list": [torch.ones(2) * 3]}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(random.Random(1).randrange(9))
            self.fixed = nn.Parameter(torch.rand(5))
        self.after = nn.Linear(8, 3)
        self.flat = nn.Parameter(torch.randn(4, 6).t())
        with torch.no_grad():
            self.after.weight[0].fill_(2.0)
            self.after.bias.data = torch.full((3,), 4.0)
        own = torch.Generator().manual_seed(7)
        self.own = nn.Parameter(torch.randn(3, generator=own))
        self.dropped = nn.Parameter(nn.functional.dropout(torch.ones(64), 0.5))
        self.last = nn.Parameter(torch.bernoulli(torch.full((16,), 0.5)))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight


@pytest.mark.parametrize(
    "build",
    [
        decoder,
        lambda: decoder(layers=3),
        convnet,
        lambda: nn.Transformer(16, 2, 2, 2, 32),
        lambda: nn.Sequential(nn.LSTM(4, 8), nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)),
        lambda: nn.Linear(8, 8).double(),
        lambda: nn.Linear(8, 8).to(torch.bfloat16),
        Odd,
    ],
)
def test_weights_are_those_of_an_ordinary_build(build):
    assert_same(build)


def test_attributes_have_elements():
    model = assert_same(Odd)
    assert model.rates == pytest.approx([0, 0.05, 0.1])
    assert model.kept["list"][0].tolist() == [3, 3]


def test_tied_weights_stay_tied():
    model = assert_same(Tied)
    assert model.head.weight is model.embedding.weight
    shard = whole_shard("head.weight", torch.empty(7, 4))
    initial_weights(model).fill([shard])
    assert torch.equal(shard.tensor, filled(model)["embedding.weight"])


def test_attributes_of_parameters_stay():
    def build():
        model = nn.Linear(2, 2)
        model.bias.no_decay = True
        model.weight.requires_grad_(False)
        return model

    model = deferred_init(build)
    assert model.bias.no_decay and not model.weight.requires_grad


def test_a_shard_gets_its_part_alone():
    model = deferred_init(decoder)
    whole = filled(model)
    name = next(n for n, p in model.named_parameters() if p.ndim == 2)
    rows, columns = whole[name].shape
    local = torch.zeros(2, 3, dtype=torch.float64)
    part = LocalShard(
        name,
        local,
        (rows, columns),
        (((slice(0, 2), slice(0, 3)), (slice(1, 3), slice(columns - 3, columns))),),
        True,
    )
    initial_weights(model).fill([part])
    assert torch.equal(local, whole[name][1:3, -3:].double())


def test_the_generator_is_left_as_it_was():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    model = deferred_init(decoder)
    filled(model)
    assert torch.equal(before, torch.get_rng_state())


def test_one_weight_is_in_memory_at_a_time():
    def build():
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(20)))
        for layer in model:  # drawn a second time, after all have been drawn once
            nn.init.normal_(layer.weight)
            nn.init.zeros_(layer.bias)
        return model

    model = deferred_init(build)
    held, weights = [], initial_weights(model)
    for _ in weights._recording.replay({s.storage for s in weights._specs.values()}):
        held.append(sum(isinstance(s, torch.UntypedStorage) for s in _storages()))
    assert max(held) - min(held) <= 2


def _storages():
    import gc

    return [o for o in gc.get_objects() if type(o) is torch.UntypedStorage]


def test_what_a_constructor_keeps_outside_of_its_modules_is_refused():
    kept = []

    def build():
        model = nn.Linear(2, 2)
        kept.append(model.weight * 2)
        return model

    with pytest.raises(UnsupportedModel, match="outside of its modules"):
        deferred_init(build)


def test_weights_of_another_model_are_refused():
    model = deferred_init(lambda: nn.Linear(2, 3))
    with pytest.raises(UnsupportedModel, match="did not exist"):
        initial_weights(model).fill([whole_shard("other", torch.empty(2))])
    with pytest.raises(UnsupportedModel, match=r"\(3, 2\)"):
        initial_weights(model).fill([whole_shard("weight", torch.empty(2, 2))])


def test_lazy_modules_are_refused():
    with pytest.raises(UnsupportedModel, match="cannot be recorded"):
        deferred_init(lambda: nn.LazyLinear(3))


# ---- what cannot be recorded is refused, and never other numbers ---------------------------------


class Held(nn.Module):
    """A weight that other attributes refer to."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.refs = [self.weight, {"again": self.weight}]
        self.lstm = nn.LSTM(2, 3)


def test_references_to_a_weight_stay_that_weight():
    model = deferred_init(Held)
    assert model.refs[0] is model.weight and model.refs[1]["again"] is model.weight
    assert model.lstm._flat_weights[0] is model.lstm.weight_ih_l0


class FromNumpy(nn.Module):
    def __init__(self):
        super().__init__()
        array = numpy.zeros(4, numpy.float32)
        tensor = torch.from_numpy(array)
        array[:] = 5
        self.weight = nn.Parameter(tensor + 1)


class ChangedByNumpy(nn.Module):
    def __init__(self):
        super().__init__()
        array = numpy.zeros(4, numpy.float32)
        self.weight = nn.Parameter(torch.from_numpy(array) + 1)
        array[:] = 5


class WritesToNumpy(nn.Module):
    def __init__(self):
        super().__init__()
        array = numpy.zeros(4, numpy.float32)
        torch.from_numpy(array).fill_(3)
        self.weight = nn.Parameter(torch.tensor(array))


class Conjugated(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, dtype=torch.complex64).conj())


class InThreads(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        with ThreadPoolExecutor() as threads:
            list(threads.map(lambda layer: nn.init.ones_(layer.weight), self.layers))


class Asserts(nn.Module):
    """As torch does where two threads use FakeTensors at once."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        assert type(self.layer.weight.data) is torch.Tensor


class Viewed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.half = self.weight.data[:2]


class Hooked(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.weight.register_hook(lambda grad: grad * 2)


class Loaded(nn.Module):
    def __init__(self, file):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.load_state_dict(torch.load(file))


@pytest.mark.parametrize(
    "build", [ChangedByNumpy, WritesToNumpy, Conjugated, InThreads, Asserts, Viewed, Hooked]
)
def test_what_would_be_other_numbers_is_refused(build):
    with pytest.raises(UnsupportedModel, match="cannot be recorded"):
        deferred_init(build)


def test_numpy_may_fill_what_is_used_later_or_it_is_refused():
    try:
        model = deferred_init(FromNumpy)
    except UnsupportedModel:
        return
    assert filled(model)["weight"].tolist() == [6] * 4


class LoadedWhole(nn.Module):
    def __init__(self, file):
        super().__init__()
        self.layer = torch.load(file, weights_only=False)["module"]


@pytest.mark.parametrize("kind", [Loaded, LoadedWhole])
def test_torch_load_in_a_build_gives_elements(tmp_path, kind):
    weights = {"layer.weight": torch.randn(2, 2), "layer.bias": torch.randn(2)}
    module = nn.Linear(2, 2)
    module.load_state_dict({name.removeprefix("layer."): each for name, each in weights.items()})
    torch.save(weights if kind is Loaded else {"module": module}, tmp_path / "x.pt")
    found = filled(deferred_init(lambda: kind(tmp_path / "x.pt")))
    assert all(torch.equal(found[name], each) for name, each in weights.items())


LOAD = torch.load  # as a build has it that imports it by name


class LoadedByName(nn.Module):
    def __init__(self, file):
        super().__init__()
        self.weight = nn.Parameter(LOAD(file)["weight"])


def test_a_load_that_is_imported_by_name_is_refused(tmp_path):
    torch.save({"weight": torch.ones(2)}, tmp_path / "x.pt")
    with pytest.raises(UnsupportedModel, match="by `from torch import load`"):
        deferred_init(lambda: LoadedByName(tmp_path / "x.pt"))


class Reseeded(nn.Module):
    """Generators that are set back to states that they, or others, have had."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.b = nn.Linear(8, 8)
        self.c = nn.Linear(4, 4)
        own = torch.Generator()
        own.set_state(torch.get_rng_state())
        self.d = nn.Parameter(torch.randn(4, generator=own))
        torch.set_rng_state(own.get_state())
        self.e = nn.Linear(2, 2)


def test_generators_that_are_set_back():
    assert_same(Reseeded)


def digest_of(build):
    return initial_weights(deferred_init(build)).digest()


def test_the_digest_is_that_of_other_processes(pool):
    here = digest_of(Odd)
    assert pool.run(digest_of, Odd, world=2) == [here, here]
    assert digest_of(partial(nn.Linear, 2, 3)) != digest_of(partial(nn.Linear, 2, 4))


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model, "weight", nn.Parameter(torch.zeros(3, 2))),
        lambda model: nn.init.zeros_(model.weight),
        lambda model: model.load_state_dict(nn.Linear(2, 3).state_dict(), assign=True),
    ],
)
def test_weights_that_are_changed_afterwards_are_refused(change):
    model = deferred_init(lambda: nn.Linear(2, 3))
    change(model)
    with pytest.raises(ConfigError, match=r"after weft\.deferred_init"):
        move_to(model, torch.device("cpu"))


def truncated(layers):
    """Linears whose initialisation reads elements until none is outside of its bounds."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(layers)))
    for linear in model:
        nn.init.trunc_normal_(linear.weight, std=0.02, a=-0.03, b=0.03)
    return model


def test_reading_elements_does_not_draw_all_that_was_drawn_before(monkeypatch):
    assert_same(partial(truncated, 6))
    ran, real = [], recorded_ops.Replay.run
    monkeypatch.setattr(
        recorded_ops.Replay, "run", lambda *args: (ran.append(args[1]), real(*args))[1]
    )
    counts = []
    for layers in (4, 16):
        ran.clear()
        deferred_init(partial(truncated, layers), 0)
        counts.append(len(ran))
    assert counts[0] > 4 and counts[1] < 6 * counts[0], counts
