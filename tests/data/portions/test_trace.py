"""Each record is traced to the documents whose tokens it holds, joined or packed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data.portions.making_raw import prepared, raw_folder, recipe_file
from phalanx.data.errors import PreparationError
from phalanx.data.portions.read_portion import read_portion
from phalanx.data.portions.tasks import Workplace
from phalanx.data.portions.write_portion import trace
from phalanx.data.stored.index import SPLITS
from phalanx.data.stored.shards import TokenShards


@pytest.mark.parametrize(("packed", "classes"), [(0, []), (100, []), (100, [40, 90])])
def test_the_tokens_of_a_record_are_those_of_the_documents_that_it_is_traced_to(
    tmp_path: Path, packed: int, classes: list[int]
) -> None:
    raw_folder(tmp_path)
    done = prepared(
        recipe_file(tmp_path, output=f"seq_len = {packed}\nlength_classes = {classes}"), tmp_path / "out"
    )
    place = Workplace(str(tmp_path / "out"))
    portions = range(len(place.plan.portions))
    texts = {d.name: d.text for number in portions for _, d in read_portion(place.plan, number) if d}
    seq_len = packed or 64
    for split in SPLITS:
        shards = TokenShards.open(tmp_path / "out", split)
        for record in range(done.index.samples(split, seq_len)):
            expected: list[int] = []
            for document in trace(place, done.index, split, record, seq_len):
                tokens = [*texts[document.name].encode(), 256]
                expected += tokens[document.first : document.first + document.tokens]
                assert document.name.startswith(Path(document.url).name) or "notes" in document.url
            expected += [256] * (seq_len - len(expected))
            assert np.array_equal(shards.read(record * seq_len, (record + 1) * seq_len), expected)
        with pytest.raises(PreparationError, match="there is no record"):
            trace(place, done.index, split, done.index.samples(split, seq_len), seq_len)
