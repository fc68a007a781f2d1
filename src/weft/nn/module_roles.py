"""Roles: which modules of a model are column, row, embedding or head, and which chains they form.

A *chain* is what tensor parallelism cuts: linears that read one tensor and whose outputs are cut
(columns), up to the one whose input is cut (row). Between them every rank works on its own heads or
its own hidden features.

Roles come, in this order, from the user (glob -> role), from a Hugging Face model's own plan, and
from a guess on the module tree. A guess is taken only where its sizes agree; what was not
understood stays whole and is noted.
"""

from __future__ import annotations

import fnmatch
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import nn

from weft.core import ConfigError, DimShard, UnsupportedModel, nearest

from .block_lists import block_lists
from .expert_roles import find_experts
from .role_types import Chain, Roles, is_conv1d, is_linear, linear_features

KINDS = ("column", "row", "embedding", "head", "whole", "attention")
HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "heads", "nhead")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads")
HEAD_DIM = ("head_dim", "attention_head_size", "d_head", "head_size", "dim_head")
GROUPS = ("num_key_value_groups", "n_rep", "kv_groups")
WIDTHS = ("split_size", "all_head_size", "inner_dim")

_COLUMN = re.compile(
    r"(w?[qkv]|[qkv]_proj|to_[qkv]+|query|key|value|w?qkv|qkv_proj|in_proj|c_attn|query_key_value|gate|gate_proj|up|"
    r"up_proj|gate_up_proj|fc1|w1|w3|c_fc|lin1|linear1|dense_h_to_4h|wi|wi_0|wi_1)"
)
_ROW = re.compile(
    r"(w?o|out|o_proj|out_proj|proj|c_proj|to_out|down|down_proj|fc2|w2|lin2|linear2|fc_out|dense|dense_4h_to_h)"
)
_PROJECTION = re.compile(r"w?[qkv]|[qkv]_proj|query|key|value|.*qkv.*|c_attn")
_CROSS = re.compile(r"encoder_hidden|cross|context|memory|kv|key_value_states")
_ELEMENTWISE = (
    nn.ReLU,
    nn.GELU,
    nn.SiLU,
    nn.Tanh,
    nn.Sigmoid,
    nn.LeakyReLU,
    nn.ELU,
    nn.Softplus,
    nn.ReLU6,
    nn.Mish,
    nn.Identity,
    nn.Dropout,
)


def find_roles(model: nn.Module, declared: Mapping[str, object] | None = None) -> Roles:
    """The roles of a model's modules. Raises UnsupportedModel or ConfigError for a declared role
    that does not fit."""
    modules = dict(model.named_modules())
    table = _check_declared(modules, declared or {})
    hf = {} if declared else _hf_plan(model, modules)
    lists = block_lists(model)
    notes: list[str] = []
    chains: list[Chain] = []
    fused = {n for n, m in modules.items() if isinstance(m, nn.MultiheadAttention)}
    if fused:
        notes.append(
            "nn.MultiheadAttention keeps its projections in one tensor of its own: left whole"
            " under tp"
        )
    for scope, linears in _scopes(modules, lists, fused):
        kinds: dict[str, str] = {}
        for name in linears:
            kind = (table[name]["role"] if name in table else hf.get(name)) or _guess(
                name, modules, linears, scope
            )
            kinds[name] = str(kind)
        chains += _chains(scope, linears, kinds, modules, table, notes)
    for name, role in table.items():
        used = {c for chain in chains for c in (*chain.columns, chain.row)}
        if role["role"] in ("column", "row") and name not in used:
            raise UnsupportedModel(
                f"roles.{name}",
                role["role"],
                "it is part of no chain of columns that ends in a row",
                "declare the columns and the row that follows them in one block",
            )
    embeddings, heads = _vocabulary(modules, lists, table)
    source = "declared" if declared else "the model's own plan" if hf else "guessed"
    whole = {name for name, role in table.items() if role["role"] == "whole"}
    experts = tuple(replace(e, cuts={}) if e.module in whole else e for e in find_experts(model))
    unknown = [each.module for each in experts if not each.cuts]
    notes += [
        f"{name}: its shapes do not tell what is inside of an expert; left whole under tp"
        for name in unknown
    ]
    notes = list(dict.fromkeys(notes))
    return Roles(tuple(chains), embeddings, heads, lists, source, tuple(notes), experts)


def _check_declared(
    modules: Mapping[str, nn.Module], declared: Mapping[str, object]
) -> dict[str, dict]:
    table: dict[str, dict] = {}
    for pattern, value in declared.items():
        role = dict(value) if isinstance(value, Mapping) else {"role": value}
        field = f'roles."{pattern}"'
        if role.get("role") not in KINDS:
            raise ConfigError(
                field, role.get("role"), "not a role", f"{nearest(str(role.get('role')), KINDS)}"
            )
        known = {"role", "heads", "kv_heads"} if role["role"] == "attention" else {"role"}
        unknown = sorted(set(role) - known)
        if unknown:
            fix = (
                'heads and kv_heads stand beside role = "attention", on the module that holds the'
                " projections"
            )
            raise ConfigError(field, unknown[0], "not a key of this role", fix)
        matches = [name for name in modules if name and fnmatch.fnmatchcase(name, pattern)]
        if not matches:
            raise ConfigError(
                field,
                role["role"],
                "no module has such a name",
                nearest(pattern, [m for m in modules if m]),
            )
        for name in matches:
            if role["role"] in ("column", "row", "head") and not is_linear(modules[name]):
                raise UnsupportedModel(
                    field,
                    role["role"],
                    f"{name} is a {type(modules[name]).__name__}",
                    "name a linear layer",
                )
            table[name] = role
    return table


def _hf_plan(model: nn.Module, modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Roles out of a transformers model's `_tp_plan` (pattern -> style)."""
    plan = getattr(model, "_tp_plan", None)
    if not isinstance(plan, Mapping):
        return {}
    styles = {"colwise": "column", "rowwise": "row"}
    found = {}
    for name in modules:
        generic = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        style = next(
            (s for p, s in plan.items() if generic == p or generic.endswith("." + p)), None
        )
        if style in styles:
            found[name] = styles[style]
    return found


def _scopes(modules: Mapping[str, nn.Module], lists: tuple[tuple[str, ...], ...], fused: set[str]):
    """Where chains are looked for, with its linears in order: each block, and each Sequential
    outside of blocks."""

    def linears(scope: str) -> list[str]:
        return [
            n
            for n, m in _below(scope, modules)
            if n != scope and is_linear(m) and not any(n.startswith(f + ".") for f in fused)
        ]

    blocks = [block for blocks in lists for block in blocks]
    for block in blocks:
        yield block, linears(block)
    for name in (name for name, module in modules.items() if isinstance(module, nn.Sequential)):
        inside = any(name == b or name.startswith(b + ".") for b in blocks)
        if not inside and not any(b.startswith(name + ".") for b in blocks):
            yield (
                name,
                [
                    f"{name}.{c}" if name else c
                    for c, m in modules[name].named_children()
                    if is_linear(m)
                ],
            )


def _below(name: str, modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Of these a module and all that are in it."""
    inside = modules[name].named_modules(prefix=name, remove_duplicate=False) if name else ()
    return ((n, m) for n, m in inside if n in modules)


def _guess(
    name: str, modules: Mapping[str, nn.Module], linears: list[str], scope: str
) -> str | None:
    parent_name, _, leaf = name.rpartition(".")
    parent = modules[parent_name]
    if isinstance(parent, nn.Sequential):
        return _guess_in_sequential(name, parent_name, modules)
    wide, tall = linear_features(modules[name])
    if _COLUMN.fullmatch(leaf):
        return "column"
    if tall > wide and not _ROW.fullmatch(leaf):
        return "column"
    if leaf == "dense" and tall > wide:  # BERT calls every linear so
        return "column"
    return "row" if _ROW.fullmatch(leaf) else None


def _guess_in_sequential(
    name: str, parent_name: str, modules: Mapping[str, nn.Module]
) -> str | None:
    """In a Sequential, linears with only elementwise modules between them pair up: column, row,
    column, row."""
    prefix = parent_name + "." if parent_name else ""
    position, open_column = {}, None
    for child, module in modules[parent_name].named_children():
        if is_linear(module):
            if open_column is None:
                open_column = child
            else:
                position[prefix + open_column], position[prefix + child] = "column", "row"
                open_column = None
        elif not isinstance(module, _ELEMENTWISE):
            open_column = None
    return position.get(name)


def _common(names: list[str]) -> str:
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
                value = getattr(source, name, None)
                if isinstance(value, int) and value > 0:
                    return value
    return 0


def _chains(
    scope: str,
    linears: list[str],
    kinds: Mapping[str, str],
    modules: Mapping[str, nn.Module],
    table: Mapping[str, dict],
    notes: list[str],
) -> list[Chain]:
    chains, columns = [], []
    for name in linears:
        if kinds[name] == "column":
            columns.append(name)
        elif kinds[name] == "row":
            if columns:
                try:
                    chains.append(_chain(scope, columns, name, modules, table))
                except _Whole as problem:
                    if any(linear in table for linear in (*columns, name)):
                        raise UnsupportedModel(
                            f"roles.{name}",
                            "row",
                            str(problem),
                            "declare heads, or leave these modules whole",
                        ) from None
                    notes.append(f"{name}: {problem}; its chain is left whole")
            elif name in table:
                raise UnsupportedModel(
                    f"roles.{name}",
                    "row",
                    "no column comes before it",
                    "declare the columns that feed it",
                )
            columns = []
    if columns:
        notes.append(f"{columns[0]}: a column with no row after it is left whole")
    return chains


class _Whole(Exception):
    """A chain that cannot be cut, and why."""


def _chain(
    scope: str,
    columns: list[str],
    row: str,
    modules: Mapping[str, nn.Module],
    table: Mapping[str, dict],
) -> Chain:
    width = linear_features(modules[row])[0]
    outs = {name: linear_features(modules[name])[1] for name in columns}
    around = _ancestors(_common(columns), scope)
    declared = next((table[a] for a in around if table.get(a, {}).get("role") == "attention"), {})
    own = [modules[a] for a in around if a != scope]
    attention = (
        bool(declared)
        or any(re.search(r"att", a.rsplit(".", 1)[-1]) for a in around)
        or any(_PROJECTION.fullmatch(name.rsplit(".", 1)[-1]) for name in columns)
        or any(
            isinstance(vars(m).get(key), int) for m in own for key in HEADS
        )  # it counts heads, whatever the names
    )
    heads = kv_heads = head_dim = 0
    cuts: dict[str, DimShard] = {}
    if attention:
        holders = [modules[a] for a in around]
        heads = int(declared.get("heads", 0))
        head_dim = width // heads if heads else _number(holders, HEAD_DIM)
        heads = heads or (width // head_dim if head_dim else _number(holders, HEADS))
        if not heads or width % heads:
            raise _Whole(f"an attention of {width} features whose number of heads is not known")
        head_dim = width // heads
        kv_heads = heads
        for name, out in outs.items():
            dim = 1 if is_conv1d(modules[name]) else 0
            if out == width:
                cuts[name] = DimShard(dim, (width,), (heads,))
            elif out > width and (out - width) % (2 * head_dim) == 0 and len(columns) == 1:
                kv_heads = (out - width) // 2 // head_dim
                cuts[name] = DimShard(
                    dim,
                    (width, kv_heads * head_dim, kv_heads * head_dim),
                    (heads, kv_heads, kv_heads),
                )
            elif out % head_dim == 0 and out < width:
                kv_heads = out // head_dim
                cuts[name] = DimShard(dim, (out,), (kv_heads,))
            else:
                raise _Whole(
                    f"{name} has {out} features, which are no whole number of heads of {head_dim}"
                )
        if int(declared.get("kv_heads", kv_heads)) != kv_heads:
            raise _Whole(
                f"kv_heads is declared as {declared['kv_heads']}, the key projection holds"
                f" {kv_heads}"
            )
        cuts[row] = DimShard(0 if is_conv1d(modules[row]) else 1, (width,), (heads,))
    else:
        for name, out in outs.items():
            if out % width:
                raise _Whole(f"{name} has {out} features, its row takes {width}")
            parts = out // width  # a fused gate and up projection has two
            cuts[name] = DimShard(
                1 if is_conv1d(modules[name]) else 0, (width,) * parts, (width,) * parts
            )
        cuts[row] = DimShard(0 if is_conv1d(modules[row]) else 1, (width,), (width,))

    entry: str | None = _common(columns)
    container = modules[entry] if entry else None
    inner: list[str] = []
    tables: list[str] = []
    region = _common([*columns, row])
    linear_names = {*columns, row}
    hidden = linear_features(modules[columns[0]])[0]
    base = region or scope
    for name, module in _below(base, modules):
        if name in linear_names or name == scope:
            continue
        own = [f"{name}.{p}" for p, _ in module.named_parameters(recurse=False)]
        if not own:
            continue
        sizes = {p.numel() for p in module.parameters(recurse=False)}
        norm = "norm" in type(module).__name__.lower()
        if sizes == {head_dim} and head_dim != hidden:
            inner += own
        elif isinstance(module, nn.Embedding) and module.embedding_dim == heads:
            tables.append(name)
            cuts[name] = DimShard(1, (heads,), (heads,))
        elif norm and sizes == {width} and width != hidden:
            raise _Whole(f"{name} normalises over features that would be cut")
        elif norm and sizes == {hidden}:  # before the columns or after the row
            entry = None if entry and name.startswith(entry + ".") else entry
        elif base != scope or isinstance(module, nn.PReLU):
            # on cut activations its gradient would be a part of the sum, before them the whole:
            # sizes do not tell
            raise _Whole(f"{own[0]} is a parameter of its own beside the linears")
    flat = bool(heads) and _common(columns) == scope
    cross = (
        container is not None
        and len(columns) > 1
        and bool(_CROSS.search(" ".join(_arguments(container))))
    )
    if not entry or entry == scope or isinstance(container, nn.Sequential) or cross:
        entry = None

    attributes: dict[str, tuple[tuple[str, int], ...]] = {}
    if heads:
        expected = {
            **dict.fromkeys(HEADS, heads),
            **dict.fromkeys(KV_HEADS, kv_heads),
            **dict.fromkeys(WIDTHS, width),
        }
        expected |= dict.fromkeys(GROUPS, heads // kv_heads)
        for name in around:
            found = [
                (key, v) for key, v in expected.items() if modules[name].__dict__.get(key) == v
            ]
            if found:
                attributes[name] = tuple(found)
    return Chain(
        tuple(columns),
        row,
        cuts,
        entry,
        tuple(inner),
        heads,
        kv_heads,
        attributes,
        cross,
        tuple(tables),
        flat,
    )


def _ancestors(name: str, scope: str) -> list[str]:
    """From this module up to the scope, both included."""
    names = [name]
    while names[-1] != scope and "." in names[-1]:
        names.append(names[-1].rpartition(".")[0])
    return names


def _arguments(module: nn.Module) -> list[str]:

    return [
        p
        for p in inspect.signature(module.forward).parameters
        if p not in ("self", "past_key_values")
    ]


def _vocabulary(
    modules: Mapping[str, nn.Module], lists: tuple[tuple[str, ...], ...], table: Mapping[str, dict]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The token embedding (the largest that is no table of positions), the linear outside of the
    blocks that scores the same vocabulary, and all that hold the weight of one of the two."""
    whole = {name for name, role in table.items() if role["role"] == "whole"}
    declared = {role["role"]: name for name, role in table.items()}
    inside = tuple(block + "." for blocks in lists for block in blocks)
    outside = {n: m for n, m in modules.items() if not n.startswith(inside) and n not in whole}
    tables = {
        n: m
        for n, m in outside.items()
        if isinstance(m, nn.Embedding) and not re.search(r"pos|type|segment", n.rsplit(".", 1)[-1])
    }
    linears = {n: m for n, m in outside.items() if is_linear(m) and not is_conv1d(m)}
    embedding = declared.get("embedding") or max(
        tables, key=lambda n: tables[n].num_embeddings, default=None
    )
    head = declared.get("head")
    if embedding is not None and head is None:
        vocab = modules[embedding].num_embeddings
        head = next((n for n in reversed(linears) if linear_features(linears[n])[1] == vocab), None)
    held = {id(modules[name].weight) for name in (embedding, head) if name is not None}

    def those(found: Mapping[str, nn.Module], first: str | None) -> tuple[str, ...]:
        tied = [n for n, m in found.items() if n != first and id(m.weight) in held]
        return (*([first] if first is not None else []), *tied)

    return those(tables, embedding), those(linears, head)
