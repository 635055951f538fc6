"""A dataset prepared in portions: what it holds, and that neither workers nor faults change a byte of it."""

from __future__ import annotations

import gzip
import os
import random
import secrets
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.portions.making_raw import Hostile, objects, prepared, raw_folder, recipe_file, texts, write_lines
from phalanx.data.errors import DatasetError, PreparationError
from phalanx.data.portions.clusters import Processes
from phalanx.data.portions.drive import carry_out, place_plan, work_share
from phalanx.data.portions.planning.plan import PREPARATION
from phalanx.data.portions.planning.recipe import read_recipe
from phalanx.data.portions.read_portion import read_portion
from phalanx.data.portions.stages import InOrder, TaskOutcome, outcome_of
from phalanx.data.portions.tasks import Workplace, manifest_key
from phalanx.data.preparing.files import files_of
from phalanx.data.preparing.prepare import prepare
from phalanx.data.reading.dataset import verify_dataset
from phalanx.data.stored.index import HELD_OUT, SPLITS, TRAIN, read_index
from phalanx.data.stored.shards import TokenShards
from phalanx.store.open_store import LocalFolder, open_store
from phalanx.store.store import Info
from store.faulty_proxy import Faults, faulty_proxy
from store.servers import Server


def test_the_tokens_are_those_of_the_short_form_on_the_same_documents(tmp_path: Path) -> None:
    raw_folder(tmp_path)
    recipe = recipe_file(tmp_path)
    out = tmp_path / "out"
    place = place_plan(read_recipe(recipe), tmp_path, str(out))
    numbers = range(len(place.plan.portions))
    documents = [d for number in numbers for _, d in read_portion(place.plan, number) if d is not None]
    carry_out(place, InOrder())
    short = prepare(documents, tmp_path / "short", tokenizer="bytes", held_out_fraction=0.1)
    index = read_index(out)
    for split in SPLITS:
        portioned, unportioned = (TokenShards.open(folder, split) for folder in (out, tmp_path / "short"))
        assert np.array_equal(portioned.read(0, portioned.tokens), unportioned.read(0, unportioned.tokens))
        assert index.split(split).documents == short.index.split(split).documents
        assert index.split(split).text_bytes == short.index.split(split).text_bytes
    assert len(index.train.shards) == len(numbers)
    assert verify_dataset(out) == 0


def test_packed_records_hold_every_token_of_every_document_once(tmp_path: Path) -> None:
    raw_folder(tmp_path)
    recipe = recipe_file(tmp_path, output="seq_len = 4096\nheld_out = 0.0")
    out = tmp_path / "out"
    prepared(recipe, out)
    index = read_index(out)
    assert (index.version, index.packed_seq_len, index.train.tokens % 4096) == (2, 4096, 0)
    shards = TokenShards.open(out, TRAIN)
    stored_tokens = shards.read(0, shards.tokens)
    place = Workplace(str(out))
    written = [d.text for n in range(len(place.plan.portions)) for _, d in read_portion(place.plan, n) if d]
    documents = bytes(stored_tokens[stored_tokens < 256].astype(np.uint8).tobytes())
    assert len(documents) == sum(len(text.encode()) for text in written)
    split = [
        bytes(part.astype(np.uint8))
        for part in np.split(stored_tokens, np.flatnonzero(stored_tokens == 256) + 1)
    ]
    assert sorted(part[:-1] for part in split if len(part) > 1) == sorted(t.encode() for t in written)
    assert verify_dataset(out) == 0


def test_long_documents_share_records_with_long_ones_alone_if_there_are_classes(tmp_path: Path) -> None:
    lengths = (30, 900, 40, 700, 20, 650, 35, 800, 10, 50)
    lines = [chr(97 + number) * length for number, length in enumerate(lengths)]
    write_lines(tmp_path / "raw" / "a.jsonl", lines)
    output = "seq_len = 1000\nheld_out = 0.0\nlength_classes = [100]"
    prepared(recipe_file(tmp_path, output=output), tmp_path / "out")
    shards = TokenShards.open(tmp_path / "out", TRAIN)
    records = shards.read(0, shards.tokens).reshape(-1, 1000)
    letters = [{chr(token) for token in record.tolist() if token < 256} for record in records]
    assert sorted(map(sorted, letters)) == [["a", "c", "e", "g", "i", "j"], ["b"], ["d"], ["f"], ["h"]]
    # A plan without classes is written as it was before there were any.
    place = place_plan(read_recipe(recipe_file(tmp_path)), tmp_path, str(tmp_path / "other"))
    assert b"length_classes" not in place.plan.text
    assert b"as_text" not in place.plan.text


def test_a_flipped_bit_of_a_shard_is_found_by_verify(tmp_path: Path) -> None:
    raw_folder(tmp_path)
    out = tmp_path / "out"
    prepared(recipe_file(tmp_path), out)
    shard = out / "train-00002.bin"
    data = bytearray(shard.read_bytes())
    data[5] ^= 1
    shard.write_bytes(data)
    with pytest.raises(DatasetError, match=r"train-00002\.bin"):
        verify_dataset(out)


def test_large_portions_are_cut_into_several_shards(tmp_path: Path) -> None:
    write_lines(tmp_path / "raw" / "a.jsonl", ["x" * 700_000, "y" * 700_000])
    out = tmp_path / "out"
    prepared(recipe_file(tmp_path, output="shard_mib = 1\nheld_out = 0.0"), out)
    assert [shard.file for shard in read_index(out).train.shards] == [
        "train-00000.bin",
        "train-00000-001.bin",
        "train-00170.bin",  # the first line fills 170 portions
        "train-00170-001.bin",
    ]
    assert verify_dataset(out) == 0


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_every_byte_is_the_same_for_any_number_of_processes(tmp_path: Path, workers: int) -> None:
    raw_folder(tmp_path)
    recipe = recipe_file(tmp_path, output='tokenizer = "bpe"\nvocab_size = 300')
    prepared(recipe, tmp_path / "alone")
    executor = Processes(workers)
    try:
        prepared(recipe, tmp_path / "out", executor)
    finally:
        executor.close()
    assert objects(tmp_path / "out") == objects(tmp_path / "alone")


@pytest.mark.parametrize("seed", range(10))
def test_every_byte_is_the_same_when_tasks_come_in_any_order_twice_or_are_lost(
    tmp_path: Path, seed: int
) -> None:
    raw_folder(tmp_path)
    recipe = recipe_file(tmp_path)
    prepared(recipe, tmp_path / "alone")
    try:
        prepared(recipe, tmp_path / "out", Hostile(seed))
    except PreparationError as error:
        # A task that is lost three times ends the preparation, which is then continued.
        assert "worker lost 3 times on" in str(error)  # noqa: PT017
        prepared(recipe, tmp_path / "out")
    assert objects(tmp_path / "out") == objects(tmp_path / "alone")


def killed_and_continued(folder: Path, out: Path, recipe: Path, kills: int, seed: int) -> int:
    """Prepare in processes that are killed after a random time; return how many kills came before an end."""
    draw = random.Random(seed)
    start = time.monotonic()
    prepared(recipe, folder / "alone")
    whole_s = time.monotonic() - start
    expected = objects(folder / "alone")
    done = 0
    while done < kills:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                prepared(recipe, out)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        time.sleep(draw.uniform(0, whole_s))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            done += 1
        else:
            assert os.WEXITSTATUS(status) == 0
        there = objects(out) if out.exists() else {}
        # A reader sees nothing, or the whole dataset.
        if "index.json" in there:
            assert verify_dataset(out) == 0
        assert all(expected.get(key, data) == data for key, data in there.items())
        if there.keys() >= expected.keys() and done < kills:
            # It was complete: begin again, from somewhere in its middle if the files for that are still there.
            if "dedup" in recipe.read_text():
                shutil.rmtree(out)
                continue
            manifests = [key for key in there if "/done/" in key]
            again = draw.sample(manifests, k=draw.randint(1, len(manifests)))
            open_store(str(out)).delete(["index.json", *again])
    prepared(recipe, out)
    assert objects(out) == expected
    return done


def test_ten_kills_at_random_change_no_byte_and_show_nothing_half_written(tmp_path: Path) -> None:
    raw_folder(tmp_path)
    assert killed_and_continued(tmp_path, tmp_path / "out", recipe_file(tmp_path), 10, seed=3) == 10


@pytest.mark.slow
def test_thirty_kills_of_a_preparation_that_finds_duplicates_change_no_byte(tmp_path: Path) -> None:
    raw_folder(tmp_path)
    recipe = recipe_file(tmp_path, "[dedup]\nnear = {}")
    assert killed_and_continued(tmp_path, tmp_path / "out", recipe, 30, seed=5) == 30


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_two_hundred_kills_of_a_packing_preparation_change_no_byte(tmp_path: Path, part: int) -> None:
    raw_folder(tmp_path, files=6)
    recipe = recipe_file(tmp_path, output="seq_len = 256")
    assert killed_and_continued(tmp_path, tmp_path / "out", recipe, 20, seed=4 + part) == 20


def test_a_worker_that_dies_is_replaced_and_its_task_done_again(tmp_path: Path) -> None:
    raw_folder(tmp_path, files=6)
    recipe = recipe_file(tmp_path)
    prepared(recipe, tmp_path / "alone")
    executor = Processes(2)
    stop = threading.Event()
    killed: list[object] = []

    def kill_two() -> None:  # a third loss of one task would end the preparation
        while len(killed) < 2 and not stop.wait(0.01):
            for process in [process for process in list(executor._running) if process not in killed][:1]:
                process.kill()
                killed.append(process)

    killer = threading.Thread(target=kill_two)
    killer.start()
    try:
        prepared(recipe, tmp_path / "out", executor)
    finally:
        stop.set()
        killer.join()
        executor.close()
    assert len(killed) == 2
    assert objects(tmp_path / "out") == objects(tmp_path / "alone")


def test_a_task_that_is_done_is_not_done_again(tmp_path: Path) -> None:
    raw_folder(tmp_path)
    out = tmp_path / "out"
    recipe = recipe_file(tmp_path)
    prepared(recipe, out)
    store = open_store(str(out))
    store.delete(["index.json", manifest_key("write", 1)])
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("train-*.bin")}
    prepared(recipe, out)
    after = {path.name: path.stat().st_mtime_ns for path in out.glob("train-*.bin")}
    assert [name for name in sorted(before) if before[name] != after[name]] == ["train-00001.bin"]


def test_a_shard_that_is_gone_is_named_before_anything_is_sealed(tmp_path: Path) -> None:
    raw_folder(tmp_path)
    out = tmp_path / "out"
    recipe = recipe_file(tmp_path)
    prepared(recipe, out)
    open_store(str(out)).delete(["index.json", "train-00002.bin"])
    with pytest.raises(
        PreparationError,
        match=r"train-00002.bin is gone or cut short .* remove preparation/done/write/00002.json",
    ):
        prepared(recipe, out)
    (out / manifest_key("write", 2)).unlink()
    prepared(recipe, out)
    assert verify_dataset(out) == 0


def test_two_workers_with_other_bytes_are_found_out(tmp_path: Path) -> None:
    raw_folder(tmp_path)
    recipe = recipe_file(tmp_path)
    place = place_plan(read_recipe(recipe), tmp_path, str(tmp_path / "out"))
    manifest = place.new_manifest("write", 0)
    place.commit(manifest)
    place.commit(manifest)
    manifest.counts["documents read"] = 1
    with pytest.raises(PreparationError, match="was written by another worker with other bytes"):
        place.commit(manifest)


def test_jobs_of_an_array_share_the_portions_and_do_what_a_lost_one_has_left(tmp_path: Path) -> None:
    raw_folder(tmp_path)
    recipe = recipe_file(tmp_path)
    prepared(recipe, tmp_path / "alone")
    place_plan(read_recipe(recipe), tmp_path, str(tmp_path / "out"))
    jobs = [
        threading.Thread(
            target=work_share, args=(Workplace(str(tmp_path / "out")), number, 3), kwargs={"patience_s": 0.5}
        )
        for number in (1, 3)  # the second never starts
    ]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    alone = objects(tmp_path / "alone")
    assert objects(tmp_path / "out") == alone


def test_two_preparations_into_one_place_at_once_give_one_dataset(tmp_path: Path) -> None:
    raw_folder(tmp_path)
    recipe = recipe_file(tmp_path, "[dedup]\nexact = true")
    prepared(recipe, tmp_path / "alone")
    with ThreadPoolExecutor(3) as pool:
        done = list(pool.map(lambda _: prepared(recipe, tmp_path / "out"), range(3)))
    assert len({dataset.index.fingerprint for dataset in done}) == 1
    assert objects(tmp_path / "out") == objects(tmp_path / "alone")


def test_a_preparation_that_begins_while_another_writes_its_first_portions_continues_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw_folder(tmp_path)
    recipe = recipe_file(tmp_path)
    lists = LocalFolder.list
    looks: list[int] = []

    def list_later(store: LocalFolder, prefix: str = "") -> Iterator[Info]:
        if not looks:  # the first look had found no plan, and waits for a processor
            looks.append(1)
            prepared(recipe, tmp_path / "out")
        return lists(store, prefix)

    monkeypatch.setattr(LocalFolder, "list", list_later)
    assert prepared(recipe, tmp_path / "out").reused
    assert looks


def test_a_file_that_changes_while_it_is_read_ends_the_task_before_its_manifest(tmp_path: Path) -> None:
    write_lines(tmp_path / "raw" / "a.jsonl", texts(20))
    recipe = recipe_file(tmp_path)
    place = place_plan(read_recipe(recipe), tmp_path, str(tmp_path / "out"))
    documents = read_portion(place.plan, 0)
    next(documents)
    os.utime(tmp_path / "raw" / "a.jsonl", ns=(5, 5))
    with pytest.raises(
        PreparationError, match=r"a.jsonl changed since the plan was made \(time of modification 5"
    ):
        list(documents)


def test_an_object_that_changes_after_it_was_planned_ends_the_preparation_with_its_etags(
    tmp_path: Path, s3_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    url = s3_server.url(secrets.token_hex(8))
    write_lines(tmp_path / "a.jsonl", texts(20))
    written = (tmp_path / "a.jsonl").read_bytes()
    open_store(url).put("raw/a.jsonl", written)
    recipe = recipe_file(tmp_path, source=f'url = "{url}/raw"')
    place = place_plan(read_recipe(recipe), tmp_path, f"{url}/out")
    planned = place.plan.files[0].mark
    open_store(url).put("raw/a.jsonl", written.replace(b"word1", b"word2"))  # as long as before
    with pytest.raises(
        PreparationError, match=r"raw/a\.jsonl changed since the plan was made \(etag "
    ) as caught:
        carry_out(place, InOrder())
    assert planned in str(caught.value)
    assert "plan again, with another --out" in str(caught.value)


class Losing:
    """Loses every task of one portion, and does the others."""

    def map(self, stage: str, url: str, tasks: Sequence[int]) -> Iterator[TaskOutcome]:
        for task in tasks:
            lost = (stage, task) == ("write", 1)
            yield (
                TaskOutcome(task, lost="killed by signal 9; out of memory?")
                if lost
                else outcome_of(Workplace(url), stage, task)
            )

    def close(self) -> None:
        pass


def test_a_portion_that_loses_its_worker_three_times_ends_the_preparation_and_is_named(
    tmp_path: Path,
) -> None:
    raw_folder(tmp_path)
    recipe = recipe_file(tmp_path)
    with pytest.raises(
        PreparationError,
        match=r"worker lost 3 times on portion 1 \(killed by signal 9; out of memory\?\): fewer --workers, or a smaller output.portion_bytes",
    ):
        prepared(recipe, tmp_path / "out", Losing())
    prepared(recipe, tmp_path / "out")
    prepared(recipe, tmp_path / "alone")
    assert objects(tmp_path / "out") == objects(tmp_path / "alone")


class Boasting:
    """Reports the tasks of one portion as done without doing them, and does the others."""

    def __init__(self) -> None:
        self.calls = 0

    def map(self, stage: str, url: str, tasks: Sequence[int]) -> Iterator[TaskOutcome]:
        self.calls += 1
        assert self.calls <= 20, "it is called without end"
        for task in tasks:
            boasts = (stage, task) == ("write", 1)
            yield TaskOutcome(task) if boasts else outcome_of(Workplace(url), stage, task)

    def close(self) -> None:
        pass


def test_a_portion_that_is_reported_as_done_without_a_manifest_ends_the_preparation_and_is_named(
    tmp_path: Path,
) -> None:
    raw_folder(tmp_path)
    with pytest.raises(
        PreparationError, match=r"portion 1 was reported as done and has no manifest in .*out;"
    ):
        prepared(recipe_file(tmp_path), tmp_path / "out", Boasting())


def test_a_task_whose_worker_process_cannot_be_started_is_lost_with_the_reason(tmp_path: Path) -> None:
    import resource

    raw_folder(tmp_path)
    place = place_plan(read_recipe(recipe_file(tmp_path)), tmp_path, str(tmp_path / "out"))
    executor = Processes(2)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    outcomes = executor.map("write", place.url, [0, 1, 2])
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        reasons = {outcome.task: outcome.lost for outcome in outcomes}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        executor.close()
    assert reasons == dict.fromkeys(range(3), "no worker process could be started: Too many open files")


def test_a_bad_line_ends_the_preparation_with_its_portion_and_number_or_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "raw" / "a.jsonl"
    write_lines(path, texts(100))
    lines = path.read_text().splitlines(keepends=True)
    lines[70] = "{broken\n"
    path.write_text("".join(lines))
    with pytest.raises(PreparationError, match=r"portion \d+: line 71 of .*a.jsonl is not JSON") as caught:
        prepared(recipe_file(tmp_path), tmp_path / "out")
    assert 'source.on_bad = "skip"' in str(caught.value)
    done = prepared(recipe_file(tmp_path, source='url = "raw"\non_bad = "skip"'), tmp_path / "counted")
    assert (done.counts["documents read"], done.counts["documents kept"], done.counts["dropped: bad"]) == (
        100,
        99,
        1,
    )


@pytest.mark.parametrize("more", ["", "[dedup]\nnear = {}"])
def test_inputs_and_outputs_of_a_store_give_the_tokens_of_folders(
    tmp_path: Path, s3_server: Server, monkeypatch: pytest.MonkeyPatch, more: str
) -> None:
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    raw = raw_folder(tmp_path)
    lines = texts(120, seed=8)
    # Row groups of different lengths, and a column beside the text that is not fetched.
    table = pa.table({"other": [text[::-1] * 3 for text in lines], "text": lines})
    pq.write_table(table, raw / "table.parquet", row_group_size=50)
    (raw / "packed.jsonl.gz").write_bytes(gzip.compress((raw / "part-0.jsonl").read_bytes()))
    url = s3_server.url(secrets.token_hex(8))
    for file in raw.rglob("*.*"):
        open_store(url).put(file.relative_to(tmp_path).as_posix(), file.read_bytes())
    prepared(recipe_file(tmp_path, more), tmp_path / "out")
    prepared(recipe_file(tmp_path, more, source=f'url = "{url}/raw"'), f"{url}/out")
    local, remote = objects(tmp_path / "out"), objects(f"{url}/out")
    shards = {key for key in local if key.endswith((".bin", ".sums"))}
    assert {key for key in remote if key.endswith((".bin", ".sums"))} == shards
    assert all(remote[key] == local[key] for key in shards)
    assert "index.json" in remote


def test_a_bad_line_of_an_object_is_named_by_its_number_in_the_whole_object(
    tmp_path: Path, s3_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    url = s3_server.url(secrets.token_hex(8))
    write_lines(tmp_path / "a.jsonl", texts(100))
    lines = (tmp_path / "a.jsonl").read_bytes().splitlines(keepends=True)
    lines[70] = b"{broken\n"
    open_store(url).put("raw/a.jsonl", b"".join(lines))
    with pytest.raises(PreparationError, match=rf"line 71 of {url}/raw/a.jsonl is not JSON"):
        prepared(recipe_file(tmp_path, source=f'url = "{url}/raw"'), f"{url}/out")


def test_bad_lines_of_an_object_that_are_skipped_fetch_nothing_more(
    tmp_path: Path, s3_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lines(tmp_path / "a.jsonl", texts(100))
    lines = (tmp_path / "a.jsonl").read_bytes().splitlines(keepends=True)
    lines[70:73] = [b"{broken\n"] * 3
    bucket = secrets.token_hex(8)
    with faulty_proxy(s3_server.port, Faults(), seed=0) as proxy:
        for name, value in s3_server.behind(proxy.port).items():
            monkeypatch.setenv(name, value)
        url = s3_server.url(bucket)
        open_store(url).put("raw/a.jsonl", b"".join(lines))
        recipe = recipe_file(tmp_path, source=f'url = "{url}/raw"\non_bad = "skip"')
        plan = place_plan(read_recipe(recipe), tmp_path, str(tmp_path / "out")).plan
        proxy.asked.clear()
        documents = [
            document for number in range(1, len(plan.portions)) for _, document in read_portion(plan, number)
        ]
    assert documents.count(None) == 3
    assert not [request for request in proxy.asked if "bytes=0-" in request]


def test_a_store_that_fails_now_and_then_changes_no_byte(
    tmp_path: Path, s3_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw_folder(tmp_path, files=2)
    recipe = recipe_file(tmp_path)
    prepared(recipe, tmp_path / "alone")
    faults = Faults(slow_down=0.05, reset=0.03, lost_answer=0.03, truncated=0.03)
    url = s3_server.url(secrets.token_hex(8))
    with faulty_proxy(s3_server.port, faults, seed=1) as proxy:
        for name, value in s3_server.behind(proxy.port).items():
            monkeypatch.setenv(name, value)
        prepared(recipe, url)
        assert sum(proxy.done.values()) > 5
        assert objects(url) == objects(tmp_path / "alone")


def test_the_held_out_split_is_by_name_as_in_the_short_form(tmp_path: Path) -> None:
    raw = raw_folder(tmp_path, files=1)
    recipe = recipe_file(tmp_path, source='url = "raw/notes"', output="held_out = 0.4")
    done = prepared(recipe, tmp_path / "out")
    short = prepare(files_of([raw / "notes"]), tmp_path / "short", tokenizer="bytes", held_out_fraction=0.4)
    assert done.index.split(HELD_OUT).documents == short.index.split(HELD_OUT).documents > 0
    assert (tmp_path / "out" / PREPARATION).is_dir()


def test_copies_across_the_splits_are_counted_and_there_are_none_if_texts_decide(tmp_path: Path) -> None:
    lines = texts(200)
    for number in range(3):
        write_lines(tmp_path / "raw" / f"{number}.jsonl", lines)
    by_name = prepared(recipe_file(tmp_path), tmp_path / "name")
    by_text = prepared(recipe_file(tmp_path, output='hold_out_by = "text"'), tmp_path / "text")
    assert by_name.held_out_in_training is not None
    assert by_name.held_out_in_training > 0.5 * by_name.index.held_out.documents
    assert by_name.index.held_out_in_training == by_name.held_out_in_training
    assert by_text.held_out_in_training == 0
    assert by_text.index.held_out.documents >= 3
