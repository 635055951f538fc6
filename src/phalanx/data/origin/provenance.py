"""Where the tokens of a run come from: of each dataset its address, the hash of its manifest, and the recipe that made it.

The fingerprint of a dataset says which tokens they are; the recipe says what they were made from (``source_sha256`` over the names and texts
of all documents, the tokenizer's fingerprint, how they were cut), so that the chain goes back to the texts. A dataset that was prepared by
steps keeps its plan beside it, and ``phalanx data trace`` follows single records.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict

from phalanx.data.reading.sources import DataIndex, MixtureIndex
from phalanx.data.stored.index import DatasetIndex
from phalanx.run.data_folders import ONLY


def provenance(index: DataIndex, addresses: Mapping[str, str]) -> dict[str, dict[str, object]]:
    """What is known of each dataset by the name of its source; of a run without ``[[data.sources]]`` that is empty."""
    known: Mapping[str, DatasetIndex] = {}
    if isinstance(index, DatasetIndex):
        known = {ONLY: index}
    elif isinstance(index, MixtureIndex):
        known = index.sources
    return {name: _of_one(one, addresses.get(name, "")) for name, one in known.items()}


def _of_one(index: DatasetIndex, address: str) -> dict[str, object]:
    return {
        "address": address,
        "fingerprint": index.fingerprint,
        "manifest_sha256": hashlib.sha256(index.to_json().encode()).hexdigest(),
        "train_tokens": index.train_tokens,
        "held_out_tokens": index.held_out_tokens,
        "documents": index.train.documents + index.held_out.documents,
        "recipe": {name: value for name, value in asdict(index.recipe).items() if value not in (None, (), 0)},
    }
