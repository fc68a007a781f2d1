"""How a chain of linears is cut: by heads in an attention, by features in a feed-forward; what else
its module holds; and where its input enters.

Sizes decide. A chain whose sizes do not tell is left whole, and a note says why.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import nn

from weft.core import DimShard, UnsupportedModel

from .config_values import config_value
from .role_types import NO_ROW, Chain, is_conv1d, is_linear, linear_features

HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "heads", "nhead")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads")
HEAD_DIM = ("v_head_dim", "head_dim", "attention_head_size", "d_head", "head_size", "dim_head")
GROUPS = ("num_key_value_groups", "n_rep", "kv_groups")
WIDTHS = ("split_size", "all_head_size", "inner_dim")

_PROJECTION = re.compile(r"w?[qkv]|[qkv]_proj|query|key|value|.*qkv.*|c_attn")
_KEYS = re.compile(r"w?[kv]|[kv]_proj|key|value")
_KEYS_VALUES = re.compile(r"(to_|w_?|fc_?)?kv(_proj|_linear)?", re.IGNORECASE)
_CROSS = re.compile(r"encoder_hidden|cross|context|memory|kv|key_value_states")


def find_chains(
    scope: str,
    linears: list[str],
    kinds: Mapping[str, str],
    modules: Mapping[str, nn.Module],
    table: Mapping[str, dict],
    notes: list[str],
) -> list[Chain]:
    """The chains of one scope.

    Args:
        scope: the block, or another module, in which chains are looked for.
        linears: its linears, in the order of their definition.
        kinds: linear -> "column", "row" or anything else.
        modules: all modules of the model by name.
        table: module -> the role that the user declared.
        notes: gets a note on each chain that is left whole.

    Raises:
        UnsupportedModel: a declared chain cannot be cut.
    """
    chains, columns = [], []
    ends = [name for name in linears if kinds[name] == "row"]
    late = {c for row in ends for c in _defined_late(row, linears, kinds)}
    for name in linears:
        if kinds[name] == "column" and name not in late:
            columns.append(name)
        elif kinds[name] == "row":
            columns += _defined_late(name, linears, kinds)
            if columns:
                try:
                    chains.append(_Cut(scope, tuple(columns), name, modules, table).chain())
                except _Whole as problem:
                    if any(linear in table for linear in (*columns, name)):
                        fix = "declare heads, or leave these modules whole"
                        raise UnsupportedModel(f"roles.{name}", "row", str(problem), fix) from None
                    notes.append(f"{name}: {problem}; its chain is left whole")
            elif name in table:
                fix = "declare the columns that feed it"
                raise UnsupportedModel(f"roles.{name}", "row", "no column comes before it", fix)
            columns = []
    if columns:
        notes.append(f"{columns[0]}: {NO_ROW}")
    return chains


def modules_below(name: str, modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Of these a module and all that are in it."""
    inside = modules[name].named_modules(prefix=name, remove_duplicate=False) if name else ()
    return ((n, modules[n]) for n, _ in inside if n in modules)


def _defined_late(row: str, linears: list[str], kinds: Mapping[str, str]) -> list[str]:
    """Columns that stand behind their row in the module of both, as a gate of attention's output:
    the next row is in another module."""
    module = row.rpartition(".")[0]
    behind = linears[linears.index(row) + 1 :]
    later = next((n for n, name in enumerate(behind) if kinds[name] == "row"), len(behind))
    if later < len(behind) and behind[later].rpartition(".")[0] == module:
        return []
    return [
        name
        for name in behind[:later]
        if kinds[name] == "column" and name.rpartition(".")[0] == module
    ]


class _Whole(Exception):
    """A chain that cannot be cut, and why."""


@dataclass
class _Cut:
    """One chain on its way: columns, and the row that ends them."""

    scope: str
    columns: tuple[str, ...]
    row: str
    modules: Mapping[str, nn.Module]
    table: Mapping[str, dict]
    cuts: dict[str, DimShard] = field(default_factory=dict)
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0

    def __post_init__(self) -> None:
        self.width = linear_features(self.modules[self.row])[0]
        self.outs = {name: linear_features(self.modules[name])[1] for name in self.columns}
        self.common = _common(self.columns)
        self.around = _ancestors(self.common, self.scope)

    def chain(self) -> Chain:
        """Raises _Whole."""
        roles = (self.table.get(name, {}) for name in self.around)
        declared = next((role for role in roles if role.get("role") == "attention"), {})
        if declared or self._is_attention():
            self._cut_heads(declared)
        else:
            self._cut_features()
        inner, compressed, tables, parameters, at_entry = self._beside()
        entry, cross = self._entry(at_entry)
        if compressed and entry is None:
            raise _Whole(f"{compressed[0]} is a parameter of its own beside the linears")
        flat = bool(self.heads) and self.common == self.scope
        return Chain(
            self.columns,
            self.row,
            self.cuts,
            entry,
            (*inner, *compressed),
            self.heads,
            self.kv_heads,
            self._attributes(),
            cross,
            tuple(tables),
            flat,
            parameters,
        )

    def _is_attention(self) -> bool:
        leaves = [name.rsplit(".", 1)[-1] for name in (*self.around, *self.columns)]
        own = [self.modules[a] for a in self.around if a != self.scope]
        return (
            any("att" in leaf and "norm" not in leaf for leaf in leaves[: len(self.around)])
            or any(_PROJECTION.fullmatch(leaf) for leaf in leaves[len(self.around) :])
            # it counts heads, whatever the names
            or any(isinstance(vars(m).get(key), int) for m in own for key in HEADS)
        )

    def _cut_heads(self, declared: Mapping[str, int]) -> None:
        width, holders = self.width, [self.modules[a] for a in self.around]
        heads = int(declared.get("heads", 0))
        head_dim = width // heads if heads else _number(holders, HEAD_DIM)
        heads = heads or (width // head_dim if head_dim else _number(holders, HEADS))
        if not heads or width % heads:
            raise _Whole(f"an attention of {width} features whose number of heads is not known")
        self.heads = self.kv_heads = heads
        self.head_dim = head_dim = width // heads
        for name, out in self.outs.items():
            leaf, alone = name.rpartition(".")[2], len(self.columns) == 1
            # of each head its query, key and value, as GPT-NeoX has them
            by_head = leaf == "query_key_value" and out == 3 * width
            if _KEYS_VALUES.fullmatch(leaf) and not alone and out % (2 * head_dim) == 0:
                self.kv_heads = out // 2 // head_dim  # all keys, then all values
                keys = out // 2, self.kv_heads
                parts: tuple[tuple[int, int], ...] = (keys, keys)
            elif out == width or by_head or (out == heads and not _KEYS.fullmatch(leaf)):
                parts = ((out, heads),)
            elif alone and out > width and (out - width) % (2 * head_dim) == 0:
                self.kv_heads = (out - width) // 2 // head_dim
                keys = self.kv_heads * head_dim, self.kv_heads
                parts = ((width, heads), keys, keys)
            elif out % head_dim == 0 and out < width:
                self.kv_heads = out // head_dim
                parts = ((out, self.kv_heads),)
            elif out % heads == 0 and not alone:
                # of each head its query and gate, or its keys and values (latent attention)
                parts = ((out, heads),)
            else:
                raise _Whole(
                    f"{name} has {out} features, which are no whole number of heads of {head_dim}"
                )
            sizes, units = zip(*parts, strict=True)
            self.cuts[name] = DimShard(self._out_dim(name), sizes, units)
        if int(declared.get("kv_heads", self.kv_heads)) != self.kv_heads:
            raise _Whole(
                f"kv_heads is declared as {declared['kv_heads']}, the key projection holds"
                f" {self.kv_heads}"
            )
        self.cuts[self.row] = DimShard(1 - self._out_dim(self.row), (width,), (heads,))

    def _cut_features(self) -> None:
        width = self.width
        for name, out in self.outs.items():
            if out % width:
                raise _Whole(f"{name} has {out} features, its row takes {width}")
            parts = (width,) * (out // width)  # a fused gate and up projection has two
            self.cuts[name] = DimShard(self._out_dim(name), parts, parts)
        self.cuts[self.row] = DimShard(1 - self._out_dim(self.row), (width,), (width,))

    def _out_dim(self, linear: str) -> int:
        """The dim of its weight that counts output features."""
        return 1 if is_conv1d(self.modules[linear]) else 0

    def _beside(
        self,
    ) -> tuple[list[str], list[str], list[str], dict[str, DimShard], bool]:
        """Parameters beside the linears: those that a rank uses whole on its part; those that make
        what columns read, and have part of their gradient where the chain's module begins; tables
        and others that are divided by heads. And whether the module may be where the input enters.
        """
        inner, compressed, tables = list[str](), list[str](), list[str]()
        parameters: dict[str, DimShard] = {}
        base = _common((*self.columns, self.row)) or self.scope
        heads, width, hidden = self.heads, self.width, linear_features(self.modules[self.row])[1]
        order = [name for name, _ in modules_below(base, self.modules)]
        at_entry = True
        for name, module in modules_below(base, self.modules):
            own = [f"{name}.{p}" for p, _ in module.named_parameters(recurse=False)]
            if name in (*self.columns, self.row, self.scope) or not own:
                continue
            sizes = {p.numel() for p in module.parameters(recurse=False)}
            norm = "norm" in type(module).__name__.lower()
            if sizes == {self.head_dim} and self.head_dim != hidden:
                inner += own
            elif isinstance(module, nn.Embedding) and module.embedding_dim == heads:
                tables.append(name)
                self.cuts[name] = DimShard(1, (heads,), (heads,))
            elif norm and sizes == {width} and width != hidden:
                raise _Whole(f"{name} normalises over features that would be cut")
            elif heads and name == base and sizes == {heads}:  # a number for each head
                parameters |= {each: DimShard(0, (heads,), (heads,)) for each in own}
            elif norm and sizes == {hidden}:  # before the columns or after the row
                at_entry = at_entry and not name.startswith(self.common + ".")
            elif norm and sizes <= {*self.outs.values()}:
                raise _Whole(f"{name} normalises over features that would be cut")
            elif (
                heads
                and base != self.scope
                and order.index(name) < order.index(self.row)
                and (norm or is_linear(module))
            ):
                compressed += own
            elif base != self.scope or isinstance(module, nn.PReLU):
                # on cut activations its gradient would be a part of the sum, before them the
                # whole: sizes do not tell
                raise _Whole(f"{own[0]} is a parameter of its own beside the linears")
        return inner, compressed, tables, parameters, at_entry

    def _entry(self, at_entry: bool) -> tuple[str | None, bool]:
        """The module where the input enters, if it is one; and whether another sequence does."""
        container = self.modules[self.common] if self.common else None
        if container is None:
            return None, False
        names, alone = _arguments(container), len(self.columns) == 1
        cross = not alone and bool(_CROSS.search(" ".join(names)))
        # after the row, or to the scores of each head: it has a gradient of its own
        added = (alone and "residual" in names) or "position_bias" in names
        never_called = isinstance(container, (nn.ModuleDict, nn.ModuleList))
        if self.common == self.scope or never_called or isinstance(container, nn.Sequential):
            at_entry = False
        return (self.common if at_entry and not cross and not added else None), cross

    def _attributes(self) -> dict[str, tuple[tuple[str, int], ...]]:
        """Module -> its own numbers of heads and features, with their values on one device."""
        if not self.heads:
            return {}
        expected = {
            **dict.fromkeys(HEADS, self.heads),
            **dict.fromkeys(KV_HEADS, self.kv_heads),
            **dict.fromkeys(WIDTHS, self.width),
            **dict.fromkeys(GROUPS, self.heads // self.kv_heads),
        }
        found = {}
        for name in self.around:
            own = vars(self.modules[name])
            numbers = [(key, v) for key, v in expected.items() if own.get(key) == v]
            numbers += _read_off_config(self.modules[name], expected)
            if numbers:
                found[name] = tuple(numbers)
        return found


def _common(names: tuple[str, ...]) -> str:
    """The innermost module that holds all of these."""
    parts = [name.split(".")[:-1] for name in names]
    common = []
    for words in zip(*parts, strict=False):
        if len(set(words)) > 1:
            break
        common.append(words[0])
    return ".".join(common)


def _number(modules: list[nn.Module], names: tuple[str, ...]) -> int:
    """The first of these attributes that a module, or the config it carries, has."""
    for holder in modules:
        for source in (holder, getattr(holder, "config", None)):
            for name in names:
                value = config_value(source, name)
                if isinstance(value, int) and value > 0:
                    return value
    return 0


def _read_off_config(module: nn.Module, expected: Mapping[str, int]) -> list[tuple[str, int]]:
    """Of these numbers those that the module's forward reads off its configuration."""
    own = vars(module)
    config = own.get("config")
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if config is None or code is None or "config" not in code.co_names:
        return []
    named = [(key, v) for key, v in expected.items() if key in code.co_names and key not in own]
    return [(f"config.{key}", v) for key, v in named if config_value(config, key) == v]


def _ancestors(name: str, scope: str) -> list[str]:
    """From this module up to the scope, both included."""
    names = [name]
    while names[-1] != scope and "." in names[-1]:
        names.append(names[-1].rpartition(".")[0])
    return names


def _arguments(module: nn.Module) -> list[str]:
    parameters = inspect.signature(module.forward).parameters
    return [p for p in parameters if p not in ("self", "past_key_values")]
