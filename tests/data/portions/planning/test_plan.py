"""Portions follow from the listing and the recipe alone, and have every document once."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.portions.making_raw import objects, prepared, raw_folder, recipe_file, write_lines
from phalanx.data.errors import CorpusError, PreparationError
from phalanx.data.portions.drive import place_plan
from phalanx.data.portions.planning.plan import default_portion_bytes, make_plan, read_plan
from phalanx.data.portions.planning.raw_files import list_raw_files
from phalanx.data.portions.planning.recipe import RawSource, read_recipe
from phalanx.data.portions.read_portion import read_portion
from phalanx.store.open_store import open_store
from store.servers import Server

MIB = 1 << 20


def test_a_portion_is_a_power_of_two_from_64_mib_on_and_there_are_32768_at_most() -> None:
    assert default_portion_bytes(1) == 64 * MIB
    assert default_portion_bytes(64 * MIB << 15) == 64 * MIB
    assert default_portion_bytes((64 * MIB << 15) + 1) == 128 * MIB


@settings(max_examples=12)
@given(portion_bytes=st.integers(1, 30_000), files=st.integers(1, 4), lines=st.integers(1, 40))
def test_documents_are_the_same_in_the_same_order_however_they_are_cut_into_portions(
    tmp_path_factory: pytest.TempPathFactory, portion_bytes: int, files: int, lines: int
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    raw_folder(folder, files, lines)

    def names(size: int) -> list[str]:
        recipe = recipe_file(folder)
        recipe.write_text(recipe.read_text().replace("portion_bytes = 4096", f"portion_bytes = {size}"))
        plan, _ = make_plan(read_recipe(recipe), folder)
        assert all(
            plan.bytes_of(number) <= size or len(pieces) == 1 for number, pieces in enumerate(plan.portions)
        )
        return [d.name for number in range(len(plan.portions)) for _, d in read_portion(plan, number) if d]

    uncut = names(1 << 30)
    assert len(uncut) == files * lines + 7
    assert names(portion_bytes) == uncut


def test_a_plan_is_what_was_planned_when_it_is_read_back(tmp_path: Path) -> None:
    raw_folder(tmp_path)
    place = place_plan(read_recipe(recipe_file(tmp_path)), tmp_path, str(tmp_path / "out"))
    assert len(place.plan.portions) > 3
    assert read_plan(place.store) == place.plan


def test_files_are_found_by_folder_glob_and_name_and_hidden_ones_are_not(tmp_path: Path) -> None:
    for name in ("a.txt", "b/c.txt", "b/.hidden.txt", ".git/d.txt", "b/e.md"):
        (tmp_path / "raw" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "raw" / name).write_text("text")

    def found(url: str) -> list[str]:
        return [file.name for file in list_raw_files([RawSource(url)], tmp_path)]

    assert found("raw") == ["a.txt", "b/c.txt", "b/e.md"]
    assert found("raw/**/*.txt") == ["a.txt", "b/c.txt"]
    assert found("raw/b/c.txt") == ["c.txt"]
    with pytest.raises(CorpusError, match=r"no file matches source\.url 'nothing'"):
        found("nothing")


def test_a_store_lists_what_a_folder_does(
    tmp_path: Path, s3_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    url = s3_server.url(secrets.token_hex(8))
    for name in ("a.txt", "b/c.txt", "b/.hidden.txt", ".git/d.txt", "b/e.md"):
        (tmp_path / "raw" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "raw" / name).write_text(name)
        open_store(url).put(f"raw/{name}", name.encode())
    for pattern in ("raw", "raw/**/*.txt", "raw/*.txt", "raw/b/c.txt", "raw/?/*"):
        local = list_raw_files([RawSource(pattern)], tmp_path)
        remote = list_raw_files([RawSource(f"{url}/{pattern}")], tmp_path)
        assert [(f.name, f.nbytes) for f in remote] == [(f.name, f.nbytes) for f in local]


def test_another_recipe_at_the_same_place_is_refused_with_what_differs(tmp_path: Path) -> None:
    raw_folder(tmp_path)
    out = tmp_path / "out"
    prepared(recipe_file(tmp_path), out)
    before = objects(out)
    with pytest.raises(PreparationError, match=r"has another recipe \(seq_len differs\)"):
        prepared(recipe_file(tmp_path, output="seq_len = 64"), out)
    with pytest.raises(PreparationError, match=r"has another recipe \(held_out differs\)"):
        prepared(recipe_file(tmp_path, output="held_out = 0.2"), out)
    assert objects(out) == before


def test_a_changed_new_or_missing_file_is_named(tmp_path: Path) -> None:
    raw = raw_folder(tmp_path)
    out = tmp_path / "out"
    recipe = recipe_file(tmp_path)
    prepared(recipe, out)
    os.utime(raw / "part-1.jsonl", ns=(1, 1))
    with pytest.raises(PreparationError, match=r"part-1.jsonl changed since the plan"):
        prepared(recipe, out)
    (raw / "part-0.jsonl").rename(tmp_path / "elsewhere")
    with pytest.raises(PreparationError, match=r"part-0.jsonl is gone since the plan .* and 1 more files"):
        prepared(recipe, out)


def test_a_place_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    raw_folder(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("mine")
    with pytest.raises(PreparationError, match=r"holds something else \(thesis.tex\)"):
        prepared(recipe_file(tmp_path), out)
    assert objects(out) == {"thesis.tex": b"mine"}


def test_a_url_of_a_file_names_a_folder(tmp_path: Path) -> None:
    raw_folder(tmp_path)
    prepared(recipe_file(tmp_path), f"file://{tmp_path}/by-url")
    prepared(recipe_file(tmp_path, source=f'url = "file://{tmp_path}/raw"'), tmp_path / "from-url")
    shards = [path.name for path in (tmp_path / "by-url").glob("*.bin")]
    assert len(shards) > 3
    for name in shards:
        assert (tmp_path / "by-url" / name).read_bytes() == (tmp_path / "from-url" / name).read_bytes()


def test_a_file_is_no_place_for_a_dataset(tmp_path: Path) -> None:
    raw_folder(tmp_path)
    (tmp_path / "out").write_text("mine")
    with pytest.raises(PreparationError, match="is a file; choose another --out"):
        prepared(recipe_file(tmp_path), tmp_path / "out")


def test_a_field_that_is_not_there_is_named_before_anything_is_written(tmp_path: Path) -> None:
    raw_folder(tmp_path)
    recipe = recipe_file(tmp_path, source='url = "raw/*.jsonl"\ntext_field = "content"')
    with pytest.raises(
        CorpusError, match=r"has no field 'content'; it has: text; name it with source.text_field"
    ):
        prepared(recipe, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_empty_sources_are_refused(tmp_path: Path) -> None:
    write_lines(tmp_path / "raw" / "a.jsonl", [])
    with pytest.raises(CorpusError, match="every file is empty"):
        prepared(recipe_file(tmp_path), tmp_path / "out")
