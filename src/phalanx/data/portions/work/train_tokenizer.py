"""The stage ``tokenizer``: one task that trains a BPE on a sample of the documents to train on.

The sample is of portions that are spread evenly over all, as many as ``output.tokenizer_bytes`` allows, at least one, and of each of them the beginning.
"""

from __future__ import annotations

from collections.abc import Iterator

import xxhash

from phalanx.data.portions.planning.plan import PreparationPlan, put_tokenizer
from phalanx.data.portions.tasks import StoredObject, Workplace
from phalanx.data.portions.work.write_portion import split_documents
from phalanx.data.preparing.interruptible import interruptible
from phalanx.data.stored.index import TRAIN
from phalanx.data.tokenizers.tokenizer import train_bpe


def sampled_portions(plan: PreparationPlan) -> list[int]:
    """The portions that the tokenizer is trained on."""
    count = len(plan.portions)
    total_bytes = max(1, sum(plan.bytes_of(number) for number in range(count)))
    chosen = max(1, min(count, count * plan.recipe.output.tokenizer_bytes // total_bytes))
    return [number * count // chosen for number in range(chosen)]


def train_tokenizer(place: Workplace, number: int) -> None:
    """Do the only task of the stage ``tokenizer``."""
    manifest = place.new_manifest("tokenizer", number)
    tokenizer = interruptible(
        lambda: train_bpe(_sample(place), vocab_size=place.plan.recipe.output.vocab_size)
    )
    for key in put_tokenizer(place.store, tokenizer):
        data = place.store.get(key)
        manifest.objects.append(StoredObject(key, len(data), xxhash.xxh3_128(data).hexdigest()))
    manifest.facts["fingerprint"] = tokenizer.fingerprint
    place.commit(manifest)


def _sample(place: Workplace) -> Iterator[str]:
    output = place.plan.recipe.output
    chosen = sampled_portions(place.plan)
    for portion in chosen:
        left = max(1, output.tokenizer_bytes // len(chosen))
        for split, document in split_documents(place, portion):
            if split == TRAIN:
                yield document.text
                left -= len(document.text.encode())
            if left <= 0:
                break
