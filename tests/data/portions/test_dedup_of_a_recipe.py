"""Deduplication within a preparation: the first copy stays, in any portion and with any worker."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from data.portions.making_raw import Hostile, objects, prepared, recipe_file, texts, write_lines
from phalanx.data.errors import PreparationError
from phalanx.data.portions.clusters import Processes
from phalanx.data.portions.planning.recipe import read_recipe
from phalanx.data.reading.dataset import verify_dataset
from phalanx.data.stored.index import TRAIN
from phalanx.data.stored.shards import TokenShards
from phalanx.run.fields import RunFileError

EXACT = "[dedup]"
BOTH = "[dedup]\nnear = {ngram = 2}"


def with_copies(folder: Path) -> list[str]:
    """Write raw lines, some of them twice or more, to several files, and return them in order."""
    draw = random.Random(7)
    lines = texts(150, seed=3)
    lines += [text.replace(" ", draw.choice(["  ", "\n", "\t"])) for text in draw.choices(lines, k=60)]
    long = [" ".join(draw.choices(lines, k=3)) for _ in range(20)]
    lines += long + [f"{text} one word more" for text in long]
    draw.shuffle(lines)
    for number in range(5):
        write_lines(folder / "raw" / f"{number}.jsonl", lines[number * 50 : number * 50 + 50])
    return lines


def documents(out: Path) -> list[str]:
    """The documents of a dataset of bytes, in order."""
    shards = TokenShards.open(out, TRAIN)
    tokens = shards.read(0, shards.tokens).tolist()
    complete, current = [], bytearray()
    for token in tokens:
        if token == 256:
            complete.append(current.decode())
            current = bytearray()
        else:
            current.append(token)
    return complete


def test_the_first_of_exact_copies_stays(tmp_path: Path) -> None:
    lines = with_copies(tmp_path)
    done = prepared(recipe_file(tmp_path, EXACT, output="held_out = 0.0"), tmp_path / "out")
    seen: dict[str, str] = {}
    for line in lines:
        seen.setdefault(" ".join(line.split()), line)
    assert documents(tmp_path / "out") == list(seen.values())
    assert done.counts["dropped: duplicate"] == len(lines) - len(seen) >= 60
    assert verify_dataset(tmp_path / "out") == 0


def test_near_copies_are_left_out_too_and_counted_apart(tmp_path: Path) -> None:
    lines = with_copies(tmp_path)
    exact = prepared(recipe_file(tmp_path, EXACT, output="held_out = 0.0"), tmp_path / "exact")
    both = prepared(recipe_file(tmp_path, BOTH, output="held_out = 0.0"), tmp_path / "both")
    assert both.counts["dropped: duplicate"] == exact.counts["dropped: duplicate"]
    # One of each long text and its copy with three more words is left; short texts may be similar by chance.
    assert 18 <= both.counts["dropped: near duplicate"] <= 25
    kept = documents(tmp_path / "both")
    assert list(dict.fromkeys(text for text in lines if text in set(kept))) == kept


@pytest.mark.parametrize("workers", [2, 3])
def test_the_bytes_are_the_same_for_any_number_of_processes(tmp_path: Path, workers: int) -> None:
    with_copies(tmp_path)
    recipe = recipe_file(tmp_path, BOTH, output='tokenizer = "bpe"\nvocab_size = 300\nseq_len = 64')
    prepared(recipe, tmp_path / "alone")
    executor = Processes(workers)
    try:
        prepared(recipe, tmp_path / "out", executor)
    finally:
        executor.close()
    assert objects(tmp_path / "out") == objects(tmp_path / "alone")
    assert not any("/read/" in key and "/done/" not in key for key in objects(tmp_path / "out"))


@pytest.mark.parametrize("seed", range(4))
def test_the_bytes_are_the_same_on_a_hostile_executor(tmp_path: Path, seed: int) -> None:
    with_copies(tmp_path)
    recipe = recipe_file(tmp_path, BOTH)
    prepared(recipe, tmp_path / "alone")
    for attempt in range(9):
        try:
            prepared(recipe, tmp_path / "out", Hostile(10 * seed + attempt))
            break
        except PreparationError as error:
            assert "worker lost 3 times on" in str(error)  # noqa: PT017
    assert objects(tmp_path / "out") == objects(tmp_path / "alone")


def test_a_dedup_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFileError, match="dedup: has no effect"):
        read_recipe(recipe_file(tmp_path, "[dedup]\nexact = false"))
