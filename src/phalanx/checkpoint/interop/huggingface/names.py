"""Hugging Face's names of parameters, and the layout of a parameter in several of its tensors.

Most tensors differ only in name. Exceptions:

- A stack of experts ``(experts, ...)`` is published as one tensor per expert, even if ``transformers`` fuses them in memory.
- Rotated rows of latent attention are published in pairs ``x0 y0 x1 y1 ...``; this project keeps halves ``x0 x1 ... y0 y1 ...`` (see
  ``phalanx.model.layers.attention.rotary``). Rows are reordered once, and both compute the same.
- Some families publish parameters with the same input as one tensor: Phi-3's queries, keys and values; gpt-oss's experts, whose gates
  and values alternate and are transposed.
- DeepSeek-V3's modules for multi-token prediction are published as layers after the last one, with copies of the shared embedding and
  output projection.
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
    # The asterisk is replaced by the number of an expert.
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
    """Rows in groups of ``group``; the last ``rotated`` of each are published in pairs. A group is a head, or a latent with the key's part."""

    group: int
    rotated: int
    first: bool = False
    """True if the first rows of a group are rotated."""

    def around(self, start: int, stop: int) -> tuple[int, int]:
        """Return the range of complete groups that contains rows ``start:stop``."""
        return start // self.group * self.group, -(-stop // self.group) * self.group

    def reordered(self, values: Any, order: list[int]) -> Any:
        """Reorder the rows within each group of a tensor or array of complete groups."""
        groups = values.reshape(-1, self.group, *values.shape[1:])
        return groups[:, order].reshape(values.shape)

    @property
    def published_at(self) -> list[int]:
        """Return, for each row of a group in this project's order, its published position: the even ones of the
        rotated rows, then the odd ones; plain rows stay.
        """
        plain = self.group - self.rotated
        if self.first:
            return [*range(0, self.rotated, 2), *range(1, self.rotated, 2), *range(self.rotated, self.group)]
        return [*range(plain), *range(plain, self.group, 2), *range(plain + 1, self.group, 2)]

    @property
    def kept_at(self) -> list[int]:
        """Inverse of ``published_at``."""
        return sorted(range(self.group), key=self.published_at.__getitem__)


@dataclass(frozen=True)
class JointSlice:
    """Position of a parameter in a tensor of several parameters, or in one with its last two dimensions exchanged."""

    shape: Extent
    """The tensor's shape."""
    axis: int
    """The tensor's dimension along which parameters are joined."""
    start: int
    step: int
    """Along ``axis``, the parameter's elements are ``start``, ``start + step``, ..."""
    transposed: bool

    def around(self, part: tuple[slice, ...]) -> tuple[slice, ...]:
        """Return the smallest contiguous part of the tensor that contains a part of the parameter."""
        slices = [*part[:-2], part[-1], part[-2]] if self.transposed else [*part]
        rows = slices[self.axis]
        slices[self.axis] = slice(
            self.start + self.step * rows.start, self.start + self.step * (rows.stop - 1) + 1
        )
        return tuple(slices)

    def extract(self, values: Any) -> Any:
        """Return the parameter's elements of ``values``, a part of the tensor selected by ``around``."""
        elements = values[(slice(None),) * self.axis + (slice(None, None, self.step),)]
        return elements.transpose(-1, -2) if self.transposed else elements

    def put(self, values: Any, into: Any) -> None:
        """Write the parameter's ``values``, complete except in the first dimension, to their positions in a piece of the tensor."""
        oriented = values.transpose(-1, -2) if self.transposed else values
        stop = self.start + self.step * oriented.shape[self.axis]
        into[(slice(None),) * self.axis + (slice(self.start, stop, self.step),)] = oriented


@dataclass(frozen=True)
class Published:
    """A tensor of a Hugging Face folder: a parameter, one expert of it, or the part of a tensor that belongs to the parameter."""

    name: str
    parameter: Parameter
    expert: int | None = None
    rotary: RotaryRows | None = None
    place: JointSlice | None = None

    @property
    def shape(self) -> Extent:
        """The tensor's shape."""
        if self.place is not None:
            return self.place.shape
        return self.parameter.shape if self.expert is None else self.parameter.shape[1:]


def published(spec: ModelSpec, family: Family | None = None) -> Iterator[Published]:
    """Yield every tensor of a resolved model as ``family`` publishes it, parameter by parameter, then the routers' biases.

    A tensor of several parameters is yielded once for each, consecutively; a stack of experts that is published apart,
    once for each expert. ``None`` means the family that the model is written as.
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
    """Yield the copies of shared tensors that are published with each module of multi-token prediction.

    They are of the embedding and the output projection.
    """
    by_name = {parameter.name: parameter for parameter in parameters(spec)}
    embedding = by_name["embedding.weight"]
    for depth in range(spec.mtp_depth):
        layer = f"model.layers.{spec.layers + depth}"
        yield Published(f"{layer}.embed_tokens.weight", embedding)
        yield Published(f"{layer}.shared_head.head.weight", by_name.get("head.weight", embedding))


def hf_name(name: str, spec: ModelSpec | None = None, family: Family | None = None) -> str:
    """Return Hugging Face's name of a parameter: ``blocks.3.attention.query.weight`` is ``model.layers.3.self_attn.q_proj.weight``.

    In the name of a stack of experts an asterisk is the placeholder of the expert's number. ``spec`` is the parameter's model; it may be
    omitted for a Llama. ``family`` defaults to the one that the model is written as. Raises KeyError if the transformer has no such
    parameter.
    """
    if name in _OUTER:
        return _OUTER[name]
    module, layer, local_name = _split(name, r"(blocks|mtp)\.(\d+)\.(.+)")
    if module == "mtp":
        if spec is None:
            raise KeyError(name)
        layer = str(spec.layers + int(layer))
        if local_name in _IN_MTP:
            return f"model.layers.{layer}.{_IN_MTP[local_name]}"
        local_name = local_name.removeprefix("block.")
    family = family_for(spec) if spec is not None and family is None else family
    return f"model.layers.{layer}.{_in_block(family)[local_name]}"


def parameter_name(name: str, family: Family | None = None) -> str:
    """Inverse of ``hf_name``, except for modules of multi-token prediction; ``None`` is Llama's family.

    A stack of experts is named with an asterisk, as by ``hf_name``. Raises KeyError for the tensor of a single expert, of several
    parameters, or of none.
    """
    if name in _OUTER_BACK:
        return _OUTER_BACK[name]
    layer, local_name = _split(name, r"model\.layers\.(\d+)\.(.+)")
    joined = () if family is None else family.joined
    back = {theirs: ours for ours, theirs in _in_block(family).items() if theirs not in joined}
    return f"blocks.{layer}.{back[local_name]}"


def _in_block(family: Family | None) -> Mapping[str, str]:
    return _IN_BLOCK if family is None else {**_IN_BLOCK, **family.in_block}


def _place(parameter: Parameter, table: Mapping[str, Parameter], family: Family) -> JointSlice | None:
    """Return the position of a parameter in a tensor that ``family`` joins from several parameters of ``table``;
    ``None`` if it is a separate tensor.
    """
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
    return JointSlice(tuple(shape), axis, start, step, joint.transposed)


def _split(name: str, pattern: str) -> tuple[str, ...]:
    """Return the groups of ``pattern`` in ``name``; raises KeyError unless all of it matches."""
    match = re.fullmatch(pattern, name)
    if match is None:
        raise KeyError(name)
    return match.groups()


def _rotary_rows(name: str, spec: ModelSpec, family: Family) -> RotaryRows | None:
    """Return the order of the rows that rotary positions turn, if it is published in another order; else ``None``."""
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
