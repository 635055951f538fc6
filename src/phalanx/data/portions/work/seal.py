"""The stage ``seal``: one task that makes a dataset of all portions by writing its index, which is the commit.

Until ``index.json`` is there, there is no dataset; and it is written by a create, or, above what a create takes, by a put of the same bytes from whoever seals.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from phalanx.data.dedup.exact import count_shared
from phalanx.data.errors import PreparationError
from phalanx.data.portions.planning.plan import INDEX_KEY, PREPARATION, put_tokenizer
from phalanx.data.portions.tasks import Stage, StoredObject, TaskManifest, Workplace, manifest_key
from phalanx.data.portions.work.write_portion import shard_tokens, texts_key
from phalanx.data.stored.index import (
    HELD_OUT,
    SPLITS,
    TRAIN,
    ChatRecipe,
    DatasetIndex,
    Recipe,
    ShardFile,
    Split,
    digest_of_shards,
)
from phalanx.store.store import MOST_CREATED_BYTES, ExistsError


def seal(place: Workplace, _number: int) -> None:
    """Do the only task of the stage ``seal``."""
    manifests = place.manifests(Stage("write", len(place.plan.portions)))
    _require_objects(place, manifests)
    index = dataset_index(place, manifests)
    put_tokenizer(place.store, place.encoding, below="")
    text = index.to_json().encode()
    try:
        if len(text) <= MOST_CREATED_BYTES:
            place.store.create(INDEX_KEY, text)
        else:
            place.store.put(INDEX_KEY, text)
    except ExistsError:
        raise PreparationError(
            f"{place.url}/{INDEX_KEY} is of another dataset; prepare again with another --out"
        ) from None


def dataset_index(place: Workplace, manifests: list[TaskManifest]) -> DatasetIndex:
    """The index of the shards of all portions, in their order. Raises ``PreparationError`` if there is no text to train on."""
    plan, output, encoding = place.plan, place.plan.recipe.output, place.encoding
    splits = {name: _joined(name, manifests) for name in SPLITS}
    if not splits[TRAIN].tokens:
        raise PreparationError(
            "no document is left to train on; see the reasons: phalanx data show " + place.url
        )
    chat = encoding.chat
    recipe = Recipe(
        plan.sha256,
        plan.tokenizer,
        output.vocab_size if plan.tokenizer == "bpe" else None,
        output.held_out,
        shard_tokens(output.shard_mib, encoding.dtype, output.seq_len),
        place.tokenizer.document_start if chat is None else (),
        output.seq_len,
        None if chat is None else ChatRecipe(chat.layout.template.sha256, chat.end, output.too_long),
        output.hold_out_by,
    )
    return encoding.index(recipe, splits)


def held_out_in_training(place: Workplace, manifests: Sequence[TaskManifest]) -> int | None:
    """Held-out documents whose text is in the training split too; ``None`` if an earlier version wrote one of the portions, and kept no hashes."""
    hashes: dict[str, list[StoredObject]] = {name: [] for name in SPLITS}
    for manifest in manifests:
        written = {item.key.rpartition("/")[2]: item for item in manifest.objects}
        for name in SPLITS:
            texts = written.get(texts_key(name, manifest.task))
            if texts is None:
                return None
            hashes[name].append(texts)

    def read(name: str) -> Iterator[NDArray[np.uint64]]:
        return (np.frombuffer(place.get_packed(texts), dtype="<u8") for texts in hashes[name])

    return count_shared(np.concatenate([np.empty(0, "<u8"), *read(HELD_OUT)]), read(TRAIN))


def _joined(name: str, manifests: list[TaskManifest]) -> Split:
    facts = [manifest.facts[name] for manifest in manifests]
    shards = tuple(ShardFile(**shard) for fact in facts for shard in fact["shards"])
    documents, text_bytes, padding, learned = (
        sum(fact.get(field, 0) for fact in facts)
        for field in ("documents", "text_bytes", "padding", "learned")
    )
    return Split(shards, documents, text_bytes, digest_of_shards(shards), padding, learned)


def _require_objects(place: Workplace, manifests: list[TaskManifest]) -> None:
    there = {info.key: info.nbytes for info in place.store.list()}
    for manifest in manifests:
        bad = next((item for item in manifest.objects if there.get(item.key) != item.nbytes), None)
        if bad is not None:
            raise PreparationError(
                f"{place.url}/{bad.key} is gone or cut short since it was written; remove {manifest_key('write', manifest.task)} there, "
                "and give the same command"
            )


def sweep(place: Workplace, stages: Sequence[str]) -> None:
    """Remove what only earlier stages needed, and what killed writers left. The dataset must be sealed."""
    for stage in stages:
        below = f"{PREPARATION}/{stage}"
        place.store.delete([info.key for info in place.store.list(below)])
    place.store.remove_unfinished()
