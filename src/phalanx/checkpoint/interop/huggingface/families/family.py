"""Description of a model family of ``transformers``: tables of fields, and functions for the rest; also tables that families share."""

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
"""Fields of ModelSpec that may be absent from a ``config.json``, with a defined meaning; all others of a family are required."""


@dataclass(frozen=True)
class Joint:
    """Layout of several parameters of a block in one published tensor: they are joined along their rows (within each matrix of a stack)."""

    parts: tuple[str, ...]
    """Names of the parameters, within the block."""
    by_turns: bool = False
    """True if rows of the parameters alternate; else all rows of one are followed by all rows of the next."""
    transposed: bool = False
    """True if the tensor's last two dimensions are those of the parameters in reverse order."""


@dataclass(frozen=True)
class Family:
    """Models of one class of ``transformers``; a field of a section is written ``moe.experts``."""

    model_type: str
    architecture: str
    fields: Mapping[str, str]
    """Field of ModelSpec to field of ``config.json``."""
    fixed: ConfigTable
    """Fields of ModelSpec that have one value in all models of the family."""
    constants: ConfigTable = field(default_factory=dict)
    """Fields of ``config.json`` that are written with this value; reading accepts no other."""
    absent: ConfigTable = field(default_factory=dict)
    """Fields of ModelSpec whose value differs from our default if ``config.json`` omits them."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of a field of ``config.json``, by the one that is written."""
    stated: tuple[str, ...] = ()
    """Fields of ``constants`` that a ``config.json`` must have, because their absence means another value."""
    handled: tuple[str, ...] = ()
    """Fields of ModelSpec that ``read`` and ``write`` handle, or that have no effect in the family."""
    read: Read = nothing_read
    write: Write = nothing_written
    check: Check = all_said
    own: tuple[str, ...] = ()
    """Fields of ``config.json`` that ``read`` and ``write`` handle, except those that many families have."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Names of a block's tensors that differ from those of ``names.py``."""
    joined: Mapping[str, Joint] = field(default_factory=dict)
    """Tensors of a block with several parameters, or one in another order, by their names."""
    stretches: tuple[str, ...] = ("llama3", "yarn", "linear")
    """Supported methods of rotary scaling."""
    rope: ConfigTable = field(default_factory=dict)
    """Parameters of the rotary embedding if ``config.json`` has none."""
    in_pairs: bool = False
    """True if the rotated rows of queries and keys are in pairs of neighbors, and not in halves."""
    written: bool = True
    """False if models of the family are written as another family with the same mathematics."""

    @property
    def in_block(self) -> Mapping[str, str]:
        """Names of a block's tensors that are the family's own, by ours."""
        return {**self.names, **{part: name for name, joint in self.joined.items() for part in joint.parts}}

    @property
    def sections(self) -> frozenset[str]:
        """Sections of ModelSpec that all models of the family have."""
        return frozenset(path.partition(".")[0] for path in (*self.fields, *self.fixed) if "." in path)
