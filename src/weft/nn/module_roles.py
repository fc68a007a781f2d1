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
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from torch import nn

from weft.core import ConfigError, UnsupportedModel, nearest

from .block_lists import block_lists
from .expert_roles import find_experts
from .linear_chains import find_chains, modules_below
from .low_rank_factors import low_rank_factors, with_factors, without_factors
from .multihead_roles import multihead_chains
from .role_types import Chain, Roles, is_conv1d, is_linear, linear_features
from .sequence_mixers import POSITIONWISE, WHOLE_SEQUENCE, sequence_mixers

ALONG_SEQUENCES = (WHOLE_SEQUENCE, POSITIONWISE)
KINDS = ("column", "row", "embedding", "head", "whole", "attention", *ALONG_SEQUENCES)

_COLUMN = re.compile(
    r"(w?[qkv]|[qkv]_proj|(q|kv)_b_proj|to_[qkv]+|query|key|value|w?qkv|qkv_proj|in_proj|c_attn|"
    r"query_key_value|g_proj|output_gate|gate|gate_proj|up|up_proj|gate_up_proj|fc1|w1|w3|c_fc|lin1|linear1|dense_h_to_4h|wi|wi_0|wi_1)"
)
_ROW = re.compile(
    r"(w?o|out|o_proj|out_proj|proj|c_proj|to_out|down|down_proj|fc2|w2|lin2|linear2|fc_out|dense|dense_4h_to_h)"
)
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
    every = dict(model.named_modules())
    factors = low_rank_factors(every)
    modules = without_factors(every, factors)
    table = _check_declared(modules, declared or {})
    # to leave something whole says nothing of the rest
    only_whole = all(role["role"] in ("whole", *ALONG_SEQUENCES) for role in table.values())
    hf = _hf_plan(model, modules) if only_whole else {}
    lists = block_lists(model)
    notes: list[str] = []
    chains: list[Chain] = []
    whole = {name for name, role in table.items() if role["role"] == "whole"}
    chains += multihead_chains(modules, whole, notes)
    fused = {n for n, m in modules.items() if isinstance(m, nn.MultiheadAttention)}
    for scope, linears in _scopes(modules, lists, fused, table):
        kinds: dict[str, str] = {}
        for name in linears:
            kind = (table[name]["role"] if name in table else hf.get(name)) or _guess(
                name, modules, linears, scope
            )
            kinds[name] = str(kind)
        chains += find_chains(scope, linears, kinds, modules, table, notes)
    for name, role in table.items():
        used = {c for chain in chains for c in chain.linears}
        if role["role"] in ("column", "row") and name not in used:
            raise UnsupportedModel(
                f"roles.{name}",
                role["role"],
                "it belongs to no chain of column linears that ends in a row linear",
                "declare the columns and the row that follows them in one block",
            )
    chained = {*factors, *(name for chain in chains for name in chain.linears)}
    chains = [with_factors(chain, factors) for chain in chains]
    embeddings, heads = _vocabulary(modules, lists, table, chained, notes)
    source = "declared" if declared else "the model's own plan" if hf else "guessed"
    experts = tuple(replace(e, cuts={}) if e.module in whole else e for e in find_experts(model))
    unknown = [each.module for each in experts if not each.cuts]
    notes += [
        f"{name}: its shapes do not tell what is inside of an expert; left whole under tp"
        for name in unknown
    ]
    notes = list(dict.fromkeys(notes))
    mixers = sequence_mixers(model, lists, chains, {n: role["role"] for n, role in table.items()})
    return Roles(tuple(chains), embeddings, heads, lists, source, tuple(notes), experts, mixers)


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
                'heads and kv_heads go with role = "attention", on the module that holds the'
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
    for name in [name for name, role in table.items() if role["role"] == "whole"]:
        for inner in (n for n in modules if n.startswith(name + ".")):
            table.setdefault(inner, {"role": "whole"})  # unless it is declared by itself
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


def _scopes(
    modules: Mapping[str, nn.Module],
    lists: tuple[tuple[str, ...], ...],
    fused: set[str],
    table: Mapping[str, dict],
) -> Iterator[tuple[str, list[str]]]:
    """Where chains are looked for, with its linears in order: each block, each Sequential outside
    of blocks, and the root with what is declared and in none of these."""

    def linears(scope: str) -> list[str]:
        return [
            n
            for n, m in modules_below(scope, modules)
            if n != scope and is_linear(m) and not any(n.startswith(f + ".") for f in fused)
        ]

    blocks, seen = [block for blocks in lists for block in blocks], set[str]()
    for block in blocks:
        yield block, linears(block)
        seen.update(linears(block))
    for name in (name for name, module in modules.items() if isinstance(module, nn.Sequential)):
        inside = any(name == b or name.startswith(b + ".") for b in blocks)
        if not inside and not any(b.startswith(name + ".") for b in blocks):
            own = [
                f"{name}.{c}" if name else c
                for c, m in modules[name].named_children()
                if is_linear(m)
            ]
            yield name, own
            seen.update(own)
    yield "", [n for n in modules if _declared_in_chain(table, n) and n not in seen]


def _declared_in_chain(table: Mapping[str, dict], name: str) -> bool:
    return name in table and table[name]["role"] in ("column", "row")


def _guess(
    name: str, modules: Mapping[str, nn.Module], linears: list[str], scope: str
) -> str | None:
    parent_name, _, leaf = name.rpartition(".")
    parent = modules[parent_name]
    if isinstance(parent, nn.Sequential):
        alone = sum(is_linear(child) for child in parent.children()) == 1
        # `to_out = Sequential(Linear, Dropout)` is named as the linear alone would be
        leaf = parent_name.rpartition(".")[2]
        if not (
            alone and parent_name != scope and (_ROW.fullmatch(leaf) or _COLUMN.fullmatch(leaf))
        ):
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


def _vocabulary(
    modules: Mapping[str, nn.Module],
    lists: tuple[tuple[str, ...], ...],
    table: Mapping[str, dict],
    chained: Collection[str],
    notes: list[str],
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The token embedding (the largest that is no table of positions), the linear outside of the
    blocks and of chains (`chained`) that scores the same vocabulary, and all that hold the weight
    of one of the two; but for those whose rows cannot be divided."""
    whole = {name for name, role in table.items() if role["role"] == "whole"}
    declared = {role["role"]: name for name, role in table.items()}
    inside = tuple(block + "." for blocks in lists for block in blocks)
    outside = {n: m for n, m in modules.items() if not n.startswith(inside)}
    tables = {
        n: m
        for n, m in outside.items()
        if isinstance(m, nn.Embedding) and not re.search(r"pos|type|segment", n.rsplit(".", 1)[-1])
    }
    linears = {
        n: m for n, m in outside.items() if is_linear(m) and not is_conv1d(m) and n not in chained
    }
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
        named = (*([first] if first is not None else []), *tied)
        return tuple(name for name in named if name not in whole)

    embeddings, heads = those(tables, embedding), those(linears, head)
    beside = {n: more for n in (*embeddings, *heads) if (more := _not_of_tokens(modules[n]))}
    notes += [f"{n} has {more} beside its rows: left whole under tp" for n, more in beside.items()]
    kept = {id(modules[name].weight) for name in beside}
    embeddings, heads = (
        tuple(n for n in names if id(modules[n].weight) not in kept)
        for names in (embeddings, heads)
    )
    return embeddings, heads


def _not_of_tokens(module: nn.Module) -> str:
    """A parameter of an embedding beside its table, or of a head that has not one number per
    token; empty if there is none."""
    for name, p in module.named_parameters():
        per_token = "." not in name and p.shape[:1] == module.weight.shape[:1]  # type: ignore[index, union-attr]
        if name != "weight" and (isinstance(module, nn.Embedding) or not per_token):
            return name
    return ""
