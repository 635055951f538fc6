"""``[data]`` and ``[[data.sources]]``: what is read, and the tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from phalanx.run.fields import FLEET, LATER, NOT_NEGATIVE, ValueRange


@dataclass(frozen=True)
class SourceSpec:
    """A prepared dataset that a run draws from in proportion to its weight; [[data.sources]] once for each."""

    name: str = ""
    """Name of the source: letters, digits, "-" and "_". It is part of the key of the source's order, and `--set data.sources.NAME.FIELD=VALUE`
    takes it."""
    path: Annotated[str, FLEET] = ""
    """Folder of the prepared dataset. All sources have the same tokenizer."""
    weights: tuple[float, ...] = (1.0,)
    """Weight in each stage of the run: its share of the samples is its weight over the sum of all. Taken as the decimals that are written."""
    use: tuple[float, ...] = (0.0, 1.0)
    """Part of the dataset's sequences that is drawn from, as fractions [from, to]: the others stay unseen, for another source or run."""
    epochs: Annotated[float, FLEET, NOT_NEGATIVE] = 1.0
    """Times that the part may be read by the end of the run, at most; a run that would read it more often is not started. 0 means no limit."""


@dataclass(frozen=True)
class DataSpec:
    """The training data and its tokenizer. The data's fingerprint, not its path, is part of the run's identity."""

    path: Annotated[str, FLEET] = ".cache/data/python-stdlib"
    """Prepared dataset (token shards): a folder, which is prepared from the corpus if it does not exist, or s3://, gs:// or az://."""
    corpus: Annotated[tuple[str, ...], FLEET] = ()
    """Text that the dataset is prepared from: files, folders, or the name of a known corpus ("python-stdlib"). On the command line,
    another data.path without another corpus leaves this one out."""
    tokenizer: Annotated[str, FLEET] = "bpe"
    """The tokenizer: "bpe" (trained on the corpus), "bytes", or the path of a tokenizer.json or of a sentencepiece tokenizer.model."""
    vocab_size: Annotated[int, FLEET, ValueRange(at_least=257)] = 4096
    """Vocabulary size of a tokenizer that is trained on the corpus."""
    held_out: Annotated[float, FLEET, ValueRange(above=0, below=0.5)] = 0.05
    """Fraction of the documents that is held out for evaluation and never trained on; of very few documents, the end of the largest."""
    stages: Annotated[tuple[int, ...], LATER] = ()
    """Numbers of steps after which the weights of data.sources change, 0 first: [0, 90000] are two stages. Empty means one stage."""
    sources: Annotated[tuple[SourceSpec, ...], LATER] = ()
    """Prepared datasets that the run draws from, instead of data.path; each is a table [[data.sources]]."""
    cache: Annotated[str, FLEET] = ""
    """Folder of each machine's own where what was read of datasets in object stores is kept for all its ranks and runs; empty is
    ~/.cache/phalanx/datasets."""
    cache_gib: Annotated[float, FLEET, ValueRange(above=0)] = 64.0
    """GiB that this folder may grow to; what was fetched longest ago goes first, and is fetched again if it is needed."""
    read_ahead_mib: Annotated[float, FLEET, NOT_NEGATIVE] = 64.0
    """MiB of samples to come that each rank has fetched from object stores, so that training does not wait for slow answers."""
    timeout_s: Annotated[float, FLEET, ValueRange(above=0)] = 1800.0
    """Seconds for which training waits for an object store that does not answer."""
