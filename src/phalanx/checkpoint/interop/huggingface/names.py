"""Hugging Face's names of parameters, and how one parameter lies in several of its tensors.

Most tensors differ in name alone. Some do not: a stack of experts ``(experts, ...)`` is published as one tensor per
expert (whatever ``transformers`` fuses in memory), and the rows of latent attention that are rotated are published in pairs
``x0 y0 x1 y1 ...`` where this project keeps halves ``x0 x1 ... y0 y1 ...`` (see ``phalanx.model.layers.attention.rotary``); reordering the rows
once makes both compute the same. Some families publish parameters that have the same input as one tensor (Phi-3's queries, keys and
values; gpt-oss's experts, whose gates and values lie by turns, and transposed). DeepSeek-V3's modules for multi-token prediction are published as layers behind the
last one, with copies of the embedding and the output projection that they share with the model.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.checkpoint.format.boxes import Extent
from phalanx.checkpoint.interop.huggingface.families.family import Family
from phalanx.checkpoint.interop.huggingface.families.known import family_for
from phalanx.model.facts.shape import buffers, parameters
from phalanx.run.kinds.grouped_attention import rotated_of
from phalanx.run.kinds.operations import Parameter, by_name
from phalanx.run.spec import ModelSpec

_OUTER = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_LINEAR = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "attention.query_down": "self_attn.q_a_proj",
    "attention.query_latent_norm": "self_attn.q_a_layernorm",
    "attention.query_up": "self_attn.q_b_proj",
    "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_latent_norm": "self_attn.kv_a_layernorm",
    "attention.kv_up": "self_attn.kv_b_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
    "ffn.shared.gate": "mlp.shared_experts.gate_proj",
    "ffn.shared.up": "mlp.shared_experts.up_proj",
    "ffn.shared.down": "mlp.shared_experts.down_proj",
}
_IN_BLOCK = {
    f"{ours}.{last}": f"{theirs}.{last}" for ours, theirs in _LINEAR.items() for last in ("weight", "bias")
} | {
    "ffn.router.weight": "mlp.gate.weight",
    "ffn.shared_gate": "mlp.shared_expert_gate.weight",
    "ffn.router.bias": "mlp.gate.e_score_correction_bias",
    # The asterisk stands for the number of an expert.
    "ffn.experts.gate": "mlp.experts.*.gate_proj.weight",
    "ffn.experts.up": "mlp.experts.*.up_proj.weight",
    "ffn.experts.down": "mlp.experts.*.down_proj.weight",
}
_IN_MTP = {
    "embedding_norm.weight": "enorm.weight",
    "hidden_norm.weight": "hnorm.weight",
    "projection.weight": "eh_proj.weight",
    "norm.weight": "shared_head.norm.weight",
}
_OUTER_BACK = {theirs: ours for ours, theirs in _OUTER.items()}


@dataclass(frozen=True)
class RotaryRows:
    """Rows in groups of ``group``, the last ``rotated`` of each published in pairs: heads, or a latent and the key's part."""

    group: int
    rotated: int
    first: bool = False
    """True if it is the first rows of a group that are rotated."""

    def around(self, start: int, stop: int) -> tuple[int, int]:
        """The whole groups that rows ``start:stop`` lie in."""
        return start // self.group * self.group, -(-stop // self.group) * self.group

    def reordered(self, values: Any, order: list[int]) -> Any:
        """The rows of a tensor or array of whole groups, each group in the given order."""
        groups = values.reshape(-1, self.group, *values.shape[1:])
        return groups[:, order].reshape(values.shape)

    @property
    def published_at(self) -> list[int]:
        """For each row of a group as this project keeps it, where it is published."""
        plain = self.group - self.rotated
        if self.first:
            return [*range(0, self.rotated, 2), *range(1, self.rotated, 2), *range(self.rotated, self.group)]
        return [*range(plain), *range(plain, self.group, 2), *range(plain + 1, self.group, 2)]

    @property
    def kept_at(self) -> list[int]:
        """The inverse of ``published_at``."""
        return sorted(range(self.group), key=self.published_at.__getitem__)


@dataclass(frozen=True)
class Place:
    """The place of a parameter in a tensor that holds several, or that has other dimensions last."""

    shape: Extent
    """The tensor's own shape."""
    axis: int
    """The tensor's dimension along which parameters are joined."""
    start: int
    step: int
    """Along it, the parameter's elements are ``start``, ``start + step``, ..."""
    transposed: bool

    def around(self, part: tuple[slice, ...]) -> tuple[slice, ...]:
        """The smallest part of the tensor without gaps that holds a part of the parameter."""
        where = [*part[:-2], part[-1], part[-2]] if self.transposed else [*part]
        rows = where[self.axis]
        where[self.axis] = slice(
            self.start + self.step * rows.start, self.start + self.step * (rows.stop - 1) + 1
        )
        return tuple(where)

    def taken(self, values: Any) -> Any:
        """The part of the parameter that lies in the ``values`` of ``around``."""
        taken = values[(slice(None),) * self.axis + (slice(None, None, self.step),)]
        return taken.transpose(-1, -2) if self.transposed else taken

    def put(self, values: Any, into: Any) -> None:
        """Writes the parameter's ``values``, whole but for the first dimension, to their places in a piece of the tensor."""
        turned = values.transpose(-1, -2) if self.transposed else values
        stop = self.start + self.step * turned.shape[self.axis]
        into[(slice(None),) * self.axis + (slice(self.start, stop, self.step),)] = turned


@dataclass(frozen=True)
class Published:
    """A tensor of a Hugging Face folder as the whole or one expert of a parameter, or what a tensor of several holds of it."""

    name: str
    parameter: Parameter
    expert: int | None = None
    rotary: RotaryRows | None = None
    place: Place | None = None

    @property
    def shape(self) -> Extent:
        """The tensor's own shape."""
        if self.place is not None:
            return self.place.shape
        return self.parameter.shape if self.expert is None else self.parameter.shape[1:]


def published(spec: ModelSpec, family: Family | None = None) -> Iterator[Published]:
    """Every tensor of a resolved model as ``family`` publishes it, parameter by parameter, then the routers' biases.

    A tensor that holds several parameters comes once for each, in neighboring places. ``None`` is the family that the model is written as.
    """
    family = family or family_for(spec)
    table = by_name((*parameters(spec), *buffers(spec)))
    for parameter in table.values():
        name, rotary = hf_name(parameter.name, spec, family), _rotary_rows(parameter.name, spec, family)
        place = _place(parameter, table, family)
        if place is not None:
            yield Published(name, parameter, place=place)
            continue
        if "*" in name:
            for expert in range(parameter.shape[0]):
                yield Published(name.replace("*", str(expert)), parameter, expert)
        else:
            yield Published(name, parameter, rotary=rotary)


def shared_copies(spec: ModelSpec) -> Iterator[Published]:
    """Tensors that are published once more with each module of multi-token prediction, which shares them."""
    by_name = {parameter.name: parameter for parameter in parameters(spec)}
    embedding = by_name["embedding.weight"]
    for depth in range(spec.mtp_depth):
        layer = f"model.layers.{spec.layers + depth}"
        yield Published(f"{layer}.embed_tokens.weight", embedding)
        yield Published(f"{layer}.shared_head.head.weight", by_name.get("head.weight", embedding))


def hf_name(name: str, spec: ModelSpec | None = None, family: Family | None = None) -> str:
    """Hugging Face's name of a parameter: ``blocks.3.attention.query.weight`` is ``model.layers.3.self_attn.q_proj.weight``.

    In the name of a stack of experts an asterisk stands for the number of the expert. ``spec`` is the parameter's model, and may be left
    out for a Llama; ``family`` is the one that it is written as, unless another is given. Raises KeyError for a name that is not a
    parameter of the transformer.
    """
    if name in _OUTER:
        return _OUTER[name]
    module, layer, rest = _split(name, r"(blocks|mtp)\.(\d+)\.(.+)")
    if module == "mtp":
        if spec is None:
            raise KeyError(name)
        layer = str(spec.layers + int(layer))
        if rest in _IN_MTP:
            return f"model.layers.{layer}.{_IN_MTP[rest]}"
        rest = rest.removeprefix("block.")
    family = family_for(spec) if spec is not None and family is None else family
    return f"model.layers.{layer}.{_in_block(family)[rest]}"


def parameter_name(name: str, family: Family | None = None) -> str:
    """The inverse of ``hf_name``, but for modules of multi-token prediction; ``None`` is Llama's family.

    Raises KeyError for a tensor of no parameter, or of several.
    """
    if name in _OUTER_BACK:
        return _OUTER_BACK[name]
    layer, rest = _split(name, r"model\.layers\.(\d+)\.(.+)")
    joined = () if family is None else family.joined
    back = {theirs: ours for ours, theirs in _in_block(family).items() if theirs not in joined}
    return f"blocks.{layer}.{back[rest]}"


def _in_block(family: Family | None) -> Mapping[str, str]:
    return _IN_BLOCK if family is None else {**_IN_BLOCK, **family.in_block}


def _place(parameter: Parameter, table: Mapping[str, Parameter], family: Family) -> Place | None:
    """Where a parameter of ``table`` lies in a tensor that the family joins; ``None`` for one that is a tensor by itself."""
    joints = [
        (parameter.name.removesuffix(part), joint)
        for joint in family.joined.values()
        for part in joint.parts
        if parameter.section == "block" and parameter.name.endswith(f".{part}")
    ]
    if not joints:
        return None
    prefix, joint = joints[0]
    rows_at = 1 if parameter.stacked else 0
    names = [prefix + part for part in joint.parts]
    sizes, number = [table[name].shape[rows_at] for name in names], names.index(parameter.name)
    shape, axis = list(parameter.shape), rows_at
    shape[rows_at] = sum(sizes)
    if joint.transposed:
        shape[-1], shape[-2], axis = (
            shape[-2],
            shape[-1],
            len(shape) - 1 if rows_at == len(shape) - 2 else rows_at,
        )
    start, step = (number, len(names)) if joint.by_turns else (sum(sizes[:number]), 1)
    return Place(tuple(shape), axis, start, step, joint.transposed)


def _split(name: str, pattern: str) -> tuple[str, ...]:
    found = re.fullmatch(pattern, name)
    if found is None:
        raise KeyError(name)
    return found.groups()


def _rotary_rows(name: str, spec: ModelSpec, family: Family) -> RotaryRows | None:
    module = name.removesuffix(".weight").removesuffix(".bias")
    if spec.mla is None:
        if family.in_pairs and module.endswith((".attention.query", ".attention.key")):
            return RotaryRows(spec.head_dim, rotated_of(spec), first=True)
        return None
    if module.endswith((".attention.query", ".attention.query_up")):
        return RotaryRows(spec.mla.nope_head_dim + spec.mla.rope_head_dim, spec.mla.rope_head_dim)
    if module.endswith(".attention.kv_down"):
        return RotaryRows(spec.mla.kv_rank + spec.mla.rope_head_dim, spec.mla.rope_head_dim)
    return None
