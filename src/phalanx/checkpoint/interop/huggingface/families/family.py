"""What a family of ``transformers`` is: tables of fields, and the functions for what no table says.

The tables that many families share stand here too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from phalanx.checkpoint.interop.huggingface.layers import (
    Check,
    Read,
    Write,
    all_said,
    nothing_read,
    nothing_written,
)

ConfigTable = Mapping[str, object]

COMMON = {
    "layers": "num_hidden_layers",
    "dim": "hidden_size",
    "heads": "num_attention_heads",
    "ffn_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "tie_embeddings": "tie_word_embeddings",
    "norm_eps": "rms_norm_eps",
    "init_std": "initializer_range",
}
GROUPED = {"kv_heads": "num_key_value_heads", "head_dim": "head_dim"}
ATTENTION_BIAS = {"attention_bias": "attention_bias"}
PATTERN = ("attention_pattern", "window")
DENSE = {"ffn": "swiglu", "mtp_depth": 0}

OPTIONAL = frozenset(
    {
        "kv_heads",
        "head_dim",
        "tie_embeddings",
        "norm_eps",
        "init_std",
        "attention_bias",
        "qkv_bias",
        "ffn_bias",
        "qk_norm",
        "rope_fraction",
        "moe.groups",
        "moe.groups_per_token",
        "mla.query_rank",
        "mtp_depth",
    }
)
"""Fields of ModelSpec whose absence from a ``config.json`` has a meaning; all others of a family must be there."""


@dataclass(frozen=True)
class Joint:
    """How the parameters of a block that are published as one tensor lie in it: joined along their rows, of which a stack has its own."""

    parts: tuple[str, ...]
    """Names of the parameters, within the block."""
    by_turns: bool = False
    """True if a row of the first is followed by one of the second; else all rows of one by all of the next."""
    transposed: bool = False
    """True if the tensor's last two dimensions are the parameters' in reverse."""


@dataclass(frozen=True)
class Family:
    """The models of one class of ``transformers``; a field of a section is written ``moe.experts``."""

    model_type: str
    architecture: str
    fields: Mapping[str, str]
    """Field of ModelSpec to field of ``config.json``."""
    fixed: ConfigTable
    """Fields of ModelSpec that have one value in all models of the family."""
    constants: ConfigTable = field(default_factory=dict)
    """Fields of ``config.json`` that are written with this value, and read with no other."""
    absent: ConfigTable = field(default_factory=dict)
    """Fields of ModelSpec that are not ours by default where ``config.json`` does not speak of them."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of a field of ``config.json``, by the one that is written."""
    stated: tuple[str, ...] = ()
    """Fields of ``constants`` that must be in a ``config.json``, since their absence means another value."""
    said: tuple[str, ...] = ()
    """Fields of ModelSpec that ``read`` and ``write`` treat, or that mean nothing to the family."""
    read: Read = nothing_read
    write: Write = nothing_written
    check: Check = all_said
    own: tuple[str, ...] = ()
    """Fields of ``config.json`` that ``read`` and ``write`` treat, but for those that many families have."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Names of a block's tensors that are not those of ``names.py``."""
    joined: Mapping[str, Joint] = field(default_factory=dict)
    """Tensors of a block that hold several parameters, or one in another order, by their names."""
    stretches: tuple[str, ...] = ("llama3", "yarn", "linear")
    """Methods by which the rotary embedding may be stretched."""
    rope: ConfigTable = field(default_factory=dict)
    """The rotary embedding's parameters where ``config.json`` has none at all."""
    in_pairs: bool = False
    """True if the rotated rows of queries and keys lie in pairs of neighbors, and not in halves."""
    written: bool = True
    """False for a family whose models are written as another, which computes the same."""

    @property
    def in_block(self) -> Mapping[str, str]:
        """Names of a block's tensors that are the family's own, by ours."""
        return {**self.names, **{part: name for name, joint in self.joined.items() for part in joint.parts}}

    @property
    def sections(self) -> frozenset[str]:
        """The sections of ModelSpec that all of its models have."""
        return frozenset(path.partition(".")[0] for path in (*self.fields, *self.fixed) if "." in path)
