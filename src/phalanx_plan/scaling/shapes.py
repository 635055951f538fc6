"""Shapes of models of a given size, in the proportions of published ones, as run files that can be planned and trained.

Dense models follow Llama 3 (arXiv:2407.21783, table 3): heads of 128, eight key/value heads, a feed-forward layer 3.5 times as wide as
the model, and a width about 120 times the number of layers (102 to 130 there). Mixtures follow DeepSeek-V3 (arXiv:2412.19437, section
4.2): latent attention, 8 of 256 experts and a shared one for each token, each expert two sevenths as wide as the model, the first
layers dense. Widths are multiples of 512 (128 in small models, 1,024 in large ones), so that tensor ranks divide them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from phalanx.model.facts.shape import count
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.read import override
from phalanx.run.spec import MlaSpec, ModelSpec, MoeSpec, RunSpec, TrainSpec

ModelKind = Literal["dense", "mixture"]
MODEL_KINDS: tuple[ModelKind, ...] = ("dense", "mixture")

EXPERTS, PER_TOKEN = 256, 8
EXPANSION = (EXPERTS + 1) / (PER_TOKEN + 1)
"""Feed-forward parameters of a mixture over a token's, shared experts counted: "experts" in the laws of mixtures."""

_ASPECT = {"dense": 120.0, "mixture": 117.5}
_OFF_ASPECT = 0.1
"""Weight of an unusual aspect ratio relative to an equally large error of the size."""
_WIDTHS = (
    *range(128, 1024, 128),
    *range(1024, 4096, 512),
    *range(4096, 65_537, 1024),
)
_LARGEST_STEP_TOKENS = 2**24


@dataclass(frozen=True)
class ModelShape:
    """A model and its counts."""

    kind: ModelKind
    model: ModelSpec
    parameters: int
    active: int
    """Active parameters of a token, the size that laws use."""

    @property
    def name(self) -> str:
        """A short name with the size."""
        total = _short(self.parameters)
        return f"dense-{total}" if self.kind == "dense" else f"moe-{total}-a{_short(self.active)}"


def shape_of(kind: ModelKind, active: float) -> ModelShape:
    """Return the shape whose active parameters are nearest ``active``, with a penalty for an unusual aspect ratio."""

    def distance(shape: ModelShape) -> float:
        off = abs(math.log(shape.active / active))
        return off + _OFF_ASPECT * abs(math.log(shape.model.dim / shape.model.layers / _ASPECT[kind]))

    return min(_candidates(kind, active), key=distance)


def _candidates(kind: ModelKind, active: float) -> Iterator[ModelShape]:
    """Yield a shape for each of the few widths around the usual one, with the number of layers nearest the size."""
    # A layer has about 12.5 squares of the width in active parameters, in dense models and mixtures.
    usual = (active * _ASPECT[kind] / 12.5) ** (1 / 3)
    nearest = sorted(_WIDTHS, key=lambda width: abs(math.log(width / usual)))[:5]
    for width in nearest:
        ten, eleven = (_counted(kind, width, layers, active) for layers in (10, 12))
        each = (eleven.active - ten.active) / 2
        layers = 10 + 2 * round((active - ten.active) / each / 2)
        yield _counted(kind, width, min(4096, max(2, layers)), active)


def _counted(kind: ModelKind, width: int, layers: int, active: float) -> ModelShape:
    """Return a shape with its counts of parameters."""
    model = resolve((_dense if kind == "dense" else _mixture)(width, layers, active))
    counts = count(model, 8192)
    return ModelShape(kind, model, counts.parameters, counts.active_parameters)


def _vocabulary(active: float) -> int:
    return 131_072 if active >= 3e9 else 32_768


def _dense(width: int, layers: int, active: float) -> ModelSpec:
    """Return a dense model of this width and depth; ``active`` decides its vocabulary and tied embeddings."""
    heads = width // 128
    return ModelSpec(
        layers=layers,
        dim=width,
        heads=heads,
        kv_heads=math.gcd(heads, 8),
        ffn_dim=_rounded(3.5 * width, 256),
        vocab_size=_vocabulary(active),
        tie_embeddings=active < 1e9,
        rope_theta=500_000.0,
    )


def _mixture(width: int, layers: int, active: float) -> ModelSpec:
    return ModelSpec(
        layers=layers,
        dim=width,
        heads=max(2, width // 64),
        ffn_dim=_rounded(18 / 7 * width, 256),
        vocab_size=_vocabulary(active),
        tie_embeddings=active < 1e9,
        mla=MlaSpec(
            query_rank=max(128, _rounded(1.5 / 7 * width, 128)),
            kv_rank=512 if width >= 2048 else 128,
            nope_head_dim=128,
            rope_head_dim=64,
            value_head_dim=128,
        ),
        moe=MoeSpec(
            experts=EXPERTS,
            per_token=PER_TOKEN,
            ffn_dim=_rounded(2 / 7 * width, 128),
            shared=1,
            first_dense=3 if layers >= 30 else 1,
            score="sigmoid",
            scale=2.5,
            groups=8,
            groups_per_token=4,
            balance_bias=True,
        ),
    )


def _rounded(value: float, to: int) -> int:
    return max(to, to * round(value / to))


def step_tokens(active: float, tokens: float) -> float:
    """Return the tokens of an optimizer step: 0.292 C^0.3271 (DeepSeek LLM, arXiv:2401.02954, recalled), at most 16.8 M as in the largest runs."""
    return float(min(_LARGEST_STEP_TOKENS, 0.292 * (6 * active * tokens) ** 0.3271))


def run_of_shape(
    shape: ModelShape, tokens: float, seq_len: int, batch: int | None, overrides: Sequence[str]
) -> RunSpec:
    """Return the run that trains ``shape`` on ``tokens``, with other fields from ``overrides``.

    Without ``batch``, a step has a power of two of sequences near ``step_tokens``. Raises ``RunFileError`` for invalid overrides.
    """
    sequences = batch or 2 ** max(0, round(math.log2(step_tokens(shape.active, tokens) / seq_len)))
    train = TrainSpec(batch_size=sequences, slots=sequences, seq_len=seq_len)
    spec = RunSpec(name=shape.name, model=shape.model, train=train)
    steps = max(1, min(10**9, math.ceil(tokens / (sequences * seq_len))))
    return override(
        replace(spec, train=replace(train, steps=steps)), tuple(overrides), Path("--budget, by its model")
    )


def _short(number: float) -> str:
    """Return a number of parameters as in a model's name: "1.3b"."""
    for letter, size in (("t", 1e12), ("b", 1e9), ("m", 1e6)):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.0f}"
