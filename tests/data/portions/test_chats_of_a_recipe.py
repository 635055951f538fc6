"""Conversations by a recipe: the records of the short command, by any executor, and what is left out is counted by reason."""

from __future__ import annotations

import json
import secrets
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.portions.making_raw import objects, prepared, recipe_file
from parity.llama3_folder import save_tokenizer
from phalanx.data.errors import PreparationError
from phalanx.data.origin import show_record
from phalanx.data.portions.clusters import Processes
from phalanx.data.portions.planning.recipe import read_recipe
from phalanx.data.reading.sources import open_place
from phalanx.data.stored.index import read_index
from phalanx.run.fields import RunFileError
from phalanx.store.open_store import open_store
from store.servers import Server

OUTPUT = 'layout = "chat"\ntokenizer = "model"\nseq_len = 64'


def conversation(number: int) -> list[dict[str, str]]:
    turns = [
        {"role": "user", "content": f"cat {number}"},
        {"role": "assistant", "content": f"dog {number % 7}"},
    ]
    return turns * (4 if number % 10 == 9 else 1)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a tokenizer, and conversations in JSON lines and in a table."""
    save_tokenizer(tmp_path / "model")
    (tmp_path / "raw").mkdir()
    lines = [json.dumps({"messages": conversation(number)}) for number in range(60)]
    (tmp_path / "raw" / "a.jsonl").write_text("\n".join(lines))
    table = pa.table(
        {"id": list(range(40)), "messages": [conversation(100 + number) for number in range(40)]}
    )
    pq.write_table(table, tmp_path / "raw" / "b.parquet", row_group_size=16)
    return tmp_path


def test_any_executor_writes_the_same_records_and_counts_what_is_too_long(place: Path) -> None:
    recipe = recipe_file(place, "[dedup]", output=OUTPUT)
    alone = prepared(recipe, place / "alone")
    executor = Processes(2)
    try:
        prepared(recipe, place / "two", executor)
    finally:
        executor.close()
    assert objects(place / "alone") == objects(place / "two")
    assert alone.counts["dropped: longer than a record"] == 10
    assert alone.counts["documents kept"] == 90
    index = read_index(place / "alone")
    assert (index.version, index.packed_seq_len) == (3, 64)
    dataset = open_place(str(place / "alone"))
    learned = [
        piece.text
        for record in range(index.samples("train", 64))
        for piece in show_record(dataset, "train", record, 64).pieces
        if piece.learned
    ]
    assert len(learned) == index.train.documents
    assert {text.removesuffix("<|eot_id|>") for text in learned} == {f"dog {number}" for number in range(7)}


def test_the_tools_of_a_table_are_read_from_a_folder_and_from_a_store(
    place: Path, s3_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    (place / "model" / "chat_template.jinja").write_text(
        "{{ tools[0].name if tools else 'none' }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>{{ m.content }}<|eot_id|>"
        "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>{% endif %}"
    )
    rows = {"messages": [conversation(1)] * 3, "tools": ['[{"name": "adder"}]', None, ""], "id": [1, 2, 3]}
    table = place / "tools.parquet"
    pq.write_table(pa.table(rows), table)
    url = s3_server.url(secrets.token_hex(8))
    open_store(url).put("tools.parquet", table.read_bytes())
    shown = []
    for number, source in enumerate((str(table), f"{url}/tools.parquet")):
        recipe = recipe_file(place, source=f'url = "{source}"', output=f"{OUTPUT}\nheld_out = 0.0")
        prepared(recipe, place / str(number))
        dataset = open_place(str(place / str(number)))
        records = range(dataset.index.samples("train", 64))
        shown.append([show_record(dataset, "train", record, 64) for record in records])
    assert shown[0] == shown[1]
    text = "".join(piece.text for record in shown[0] for piece in record.pieces)
    assert (text.count("adder<|start_header_id|>"), text.count("none<|start_header_id|>")) == (1, 2)


def test_conversations_that_are_cut_end_after_an_answer(place: Path) -> None:
    cut = prepared(recipe_file(place, output=f'{OUTPUT}\ntoo_long = "cut"'), place / "cut")
    assert cut.counts["documents kept"] == 100
    assert "dropped: longer than a record" not in cut.counts


def test_a_bad_conversation_stops_the_preparation_or_is_counted(place: Path) -> None:
    bad = [{"role": "user", "content": "<|eot_id|>"}, {"role": "assistant", "content": "dog"}]
    (place / "raw" / "c.jsonl").write_text(json.dumps({"messages": bad}))
    with pytest.raises(
        PreparationError, match=r"c\.jsonl@0: message 1 spells the special token '<\|eot_id\|>'"
    ):
        prepared(recipe_file(place, output=OUTPUT), place / "out")
    skipping = recipe_file(place, source='url = "raw"\non_bad = "skip"', output=OUTPUT)
    assert prepared(skipping, place / "skipped").counts["dropped: bad"] == 1


def test_another_template_is_another_recipe(place: Path) -> None:
    recipe = recipe_file(place, output=OUTPUT)
    prepared(recipe, place / "out")
    (place / "model" / "chat_template.jinja").write_text(
        "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>{{ m.content }}<|eot_id|>{% endfor %}"
    )
    with pytest.raises(PreparationError, match=r"has another recipe.*template differs"):
        prepared(recipe, place / "out")


def test_fields_that_conversations_need_are_named(place: Path) -> None:
    for output, fields in (
        ('layout = "chat"\ntokenizer = "bytes"', {"output.seq_len", "output.tokenizer"}),
        (
            'tokenizer = "bytes"\ntoo_long = "cut"\nchat_template = "x.jinja"',
            {"output.too_long", "output.chat_template"},
        ),
    ):
        with pytest.raises(RunFileError) as refused:
            read_recipe(recipe_file(place, output=output))
        assert {problem.path for problem in refused.value.problems} == fields
