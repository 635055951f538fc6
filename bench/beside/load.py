"""The load under which our engine is measured beside another's: counts of texts and tokens, and a model for each kind of numerics."""

from __future__ import annotations

import argparse

import torch

from bench.serve.engine import random_model
from phalanx.model.transformer import Transformer
from phalanx_serve.numerics import Numerics

ROWS = tuple((texts, tokens) for texts in (1, 16) for tokens in (1, 32))
"""Numbers of texts and of new tokens in each: a prompt alone, and decoding behind it."""
ROUNDS = 3


def texts_and_tokens(text: str) -> tuple[int, int]:
    """Parse a row of the command line."""
    texts, tokens = map(int, text.split(","))
    return texts, tokens


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """Add options for the shape of the model, ``row`` and ``rounds``."""
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument(
        "--row",
        action="append",
        type=texts_and_tokens,
        metavar="TEXTS,TOKENS",
        help="measure this row alone; may be repeated",
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds that count; one more comes before")


def models_of(dim: int, layers: int, dtype: torch.dtype) -> dict[Numerics, Transformer]:
    """Return a model for each kind of numerics, with the same weights: fast numerics may give a model other products."""
    kinds: tuple[Numerics, ...] = ("exact", "fast")
    return {kind: random_model(dim, layers, dtype) for kind in kinds}
