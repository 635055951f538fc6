"""Files of a preparation that a disk, a copy or a hand has damaged are named with what to do, and change no byte of the dataset."""

from __future__ import annotations

from pathlib import Path

import pytest

from data.portions.making_raw import objects, prepared, raw_folder, recipe_file
from phalanx.data.errors import DataError, PreparationError
from phalanx.data.portions.drive import sealed_index
from phalanx.data.portions.tasks import Workplace
from phalanx.data.portions.write_portion import trace
from phalanx.data.stored.index import TRAIN

MANIFEST, PLAN, ORIGIN = (
    "preparation/done/write/00001.json",
    "preparation/plan.json",
    "preparation/origin/train-00001.z",
)
JUNK = [b"", b"null", b"[]", b"{}", b'"text"', b"\xff\xfe", b"[" * 100_000, b'{"version": 1}']


@pytest.fixture(scope="module")
def undamaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    raw_folder(folder)
    prepared(recipe_file(folder, output="seq_len = 100"), folder / "out")
    return folder


def damaged(undamaged: Path, name: str) -> list[bytes]:
    """Damaged contents of a file: other content, some beginnings of its own, and its own with one flipped bit."""
    content = (undamaged / "out" / name).read_bytes()
    places = range(0, len(content), max(1, len(content) // 12))
    flips = [
        content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :] for place in places if content
    ]
    return [*JUNK, *(content[:place] for place in places), *flips]


@pytest.mark.parametrize("name", [MANIFEST, PLAN, ORIGIN, "index.json"])
def test_any_content_in_place_of_a_file_of_a_preparation_is_refused_without_a_crash(
    undamaged: Path, name: str
) -> None:
    file = undamaged / "out" / name
    content = file.read_bytes()
    refusals = 0
    try:
        for other in damaged(undamaged, name):
            file.write_bytes(other)
            try:
                place = Workplace(str(undamaged / "out"))
                index = sealed_index(place)
                assert place.manifest("write", 1) is not None
                assert index is not None
                for record in range(0, index.samples(TRAIN, 100), 7):
                    trace(place, index, TRAIN, record, 100)
            except DataError as error:
                assert name in str(error) or "there is no plan" in str(error)  # noqa: PT017
                refusals += 1
            try:
                prepared(undamaged / "recipe.toml", undamaged / "out")
            except DataError:
                refusals += 1
    finally:
        file.write_bytes(content)
    assert refusals >= len(JUNK)


def test_a_damaged_manifest_that_is_removed_is_made_again_with_the_bytes_that_were_there(
    undamaged: Path,
) -> None:
    before = objects(undamaged / "out")
    (undamaged / "out" / MANIFEST).write_bytes(b"{")
    with pytest.raises(PreparationError, match=rf"{MANIFEST} is damaged .*remove it, and give the same comm"):
        prepared(undamaged / "recipe.toml", undamaged / "out")
    (undamaged / "out" / MANIFEST).unlink()
    (undamaged / "out" / "index.json").unlink()
    prepared(undamaged / "recipe.toml", undamaged / "out")
    assert objects(undamaged / "out") == before
