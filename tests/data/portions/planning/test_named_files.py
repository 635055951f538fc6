"""Files that are named on the command line, prepared in portions: the tokens of the short form in one process, by any workers, from and to any place."""

from __future__ import annotations

import gzip
import json
import re
import secrets
from pathlib import Path

import pytest
from click.testing import CliRunner

from data.portions.making_raw import Hostile, objects, raw_folder, texts, write_lines
from phalanx.cli.data.data_command import command
from phalanx.data.errors import CorpusError, PreparationError
from phalanx.data.portions.drive import carry_out, place_named_files, recipe_of_files
from phalanx.data.portions.planning.recipe import OutputRecipe
from phalanx.data.portions.stages import Executor, InOrder
from phalanx.data.preparing.prepare import PreparedDataset, prepare
from phalanx.data.reading.dataset import verify_dataset
from phalanx.data.stored.index import SPLITS, read_index
from phalanx.data.stored.shards import TokenShards
from phalanx.store.open_store import open_store
from phalanx.train.start.prepare import documents_of
from store.servers import Server

OUTPUT = OutputRecipe(tokenizer="bytes", held_out=0.1, portion_bytes=4096)


def in_portions(
    named: list[str], out: Path | str, output: OutputRecipe = OUTPUT, executor: Executor | None = None
) -> PreparedDataset:
    place, _ = place_named_files(named, recipe_of_files(named, output), str(out))
    return carry_out(place, executor or InOrder())


def tokens(folder: Path, split: str) -> list[int]:
    shards = TokenShards.open(folder, split)
    return [int(token) for token in shards.read(0, shards.tokens)]


def output_of(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(command, list(arguments))
    assert done.exit_code == code, done.output
    return done.output


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_the_tokens_and_splits_are_those_of_one_process_without_portions(
    tmp_path: Path, tokenizer: str
) -> None:
    raw = raw_folder(tmp_path)
    (raw / "packed.jsonl.gz").write_bytes(gzip.compress((raw / "part-0.jsonl").read_bytes()))
    (raw / "README.md").write_text("not to be trained on, beside data of rows")
    named = [str(raw / "notes"), str(raw / "part-[12].jsonl"), str(raw / "packed.jsonl.gz")]
    for number, names in enumerate((named, [str(raw)])):
        unportioned, portioned = tmp_path / f"one-{number}", tmp_path / f"other-{number}"
        short = prepare(
            documents_of(tuple(names)),
            unportioned,
            tokenizer=tokenizer,
            vocab_size=300 if tokenizer == "bpe" else None,
            held_out_fraction=0.1,
        )
        output = OutputRecipe(tokenizer=tokenizer, vocab_size=300, held_out=0.1, portion_bytes=4096)
        done = in_portions(names, portioned, output)
        assert len(done.index.train.shards) > 3
        for split in SPLITS:
            assert tokens(unportioned, split) == tokens(portioned, split)
            assert short.index.split(split).documents == done.index.split(split).documents
        assert (unportioned / "tokenizer.json").read_bytes() == (portioned / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_end_of_the_largest_of_few_documents_is_held_out_as_without_portions(
    tmp_path: Path, count: int
) -> None:
    for number in range(count):
        (tmp_path / f"{number}.txt").write_text(" ".join(texts(20 + number, seed=number)))
    named = [str(tmp_path / "*.txt")]
    output = OutputRecipe(tokenizer="bytes", held_out=0.05, portion_bytes=2000)
    done = in_portions(named, tmp_path / "other", output)
    prepare(documents_of(tuple(named)), tmp_path / "one", tokenizer="bytes", held_out_fraction=0.05)
    for split in SPLITS:
        assert tokens(tmp_path / "one", split) == tokens(tmp_path / "other", split) != []
    assert done.counts["documents kept"] == done.counts["documents read"] == count
    # The plan records it, and is read back.
    assert in_portions(named, tmp_path / "other", output).reused


def test_workers_that_do_tasks_twice_in_any_order_and_lose_some_change_no_byte(tmp_path: Path) -> None:
    named = [str(raw_folder(tmp_path))]
    in_portions(named, tmp_path / "alone")
    for seed in range(2):
        try:
            in_portions(named, tmp_path / f"out-{seed}", executor=Hostile(seed))
        except PreparationError:
            in_portions(
                named, tmp_path / f"out-{seed}"
            )  # a task was lost three times: the same command resumes
        assert objects(tmp_path / f"out-{seed}") == objects(tmp_path / "alone")


def test_inputs_and_outputs_in_a_store_give_the_bytes_of_folders(
    tmp_path: Path, s3_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    raw = raw_folder(tmp_path)
    url = s3_server.url(secrets.token_hex(8))
    for file in raw.glob("*.jsonl"):
        open_store(url).put(f"raw/{file.name}", file.read_bytes())
    local = [str(raw / "*.jsonl"), str(raw / "notes")]
    alone = in_portions(local, tmp_path / "alone")
    mixed = [f"{url}/raw/*.jsonl", str(raw / "notes")]
    options = ("--tokenizer", "bytes", "--held-out", "0.1", "--json")
    # So little text is one portion of the command line.
    out = json.loads(output_of("prepare", *mixed, "--out", f"{url}/out", *options).splitlines()[-1])
    assert out["train_tokens"] == alone.index.train.tokens
    assert out["read"] == {"jsonl": {"files": 3}, "text": {"files": 7}}
    assert in_portions(mixed, f"{url}/portions").index.fingerprint == alone.index.fingerprint


def test_the_command_resumes_where_another_was_ended(tmp_path: Path) -> None:
    raw, out = str(raw_folder(tmp_path)), str(tmp_path / "out")
    place, _ = place_named_files([raw], recipe_of_files([raw], OutputRecipe(held_out=0.05)), out)
    assert not place.is_done("write", 0)
    first = json.loads(
        output_of(
            "prepare", raw, "--out", out, "--workers", "1", "--json", "--tokenizer", "bpe"
        ).splitlines()[-1]
    )
    again = json.loads(output_of("prepare", raw, "--out", out, "--workers", "1", "--json").splitlines()[-1])
    assert (first["reused"], again["reused"]) == (False, True)
    assert verify_dataset(Path(out)) == 0
    assert read_index(Path(out)).fingerprint == first["fingerprint"]


def test_what_is_bad_is_left_out_and_counted_or_ends_the_preparation_with_its_place(tmp_path: Path) -> None:
    write_lines(tmp_path / "raw" / "a.jsonl", texts(40))
    with (tmp_path / "raw" / "a.jsonl").open("a") as file:
        file.write("{broken\n")
    (tmp_path / "raw" / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(50))
    raw, out = str(tmp_path / "raw"), str(tmp_path / "out")
    options = ("--out", out, "--workers", "1", "--tokenizer", "bytes")
    assert "picture.png" in output_of("prepare", raw, *options, code=1)
    assert "line 41 of" in output_of("prepare", f"{raw}/a.jsonl", *options, code=1)
    done = output_of("prepare", raw, "--out", f"{out}-2", *options[2:], "--on-bad", "skip")
    assert "left out: " in done
    assert "dropped: bad: 1" in done


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["python-stdlib", "--workers", "2"],
            "python-stdlib is a corpus of this machine .* data copy FOLDER",
        ),
        (["raw", "--slurm"], "--slurm needs the number of jobs in its array: add --workers N"),
        (["raw", "--dask", "tcp://x:1", "--ray", "auto"], "--dask and --ray are two clusters; leave one out"),
        (["raw", "--dask", "tcp://x:1", "--workers", "2"], "or jobs of --slurm; with --dask, leave it out"),
        (["raw", "--workers", "0"], "0 is not in the range"),
    ],
)
def test_options_that_do_not_go_together_are_refused_with_the_remedy(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    output = " ".join(output_of("prepare", *arguments, "--out", str(tmp_path / "out"), code=2).split())
    assert re.search(message, output), output
    assert not (tmp_path / "out").exists()


def test_a_place_with_a_dataset_that_was_prepared_the_other_way_is_refused(tmp_path: Path) -> None:
    raw = str(raw_folder(tmp_path))
    for first, second, message in (
        ([], ["--workers", "1"], "a dataset that was not prepared in portions"),
        (["--workers", "1"], [], "found again with --workers"),
    ):
        out = str(tmp_path / f"out-{len(first)}")
        options = ["--out", out, "--tokenizer", "bytes"]
        output_of("prepare", raw, *options, *first)
        assert message in output_of("prepare", raw, *options, *second, code=1)


def test_a_file_that_is_named_twice_or_not_there_is_refused(
    tmp_path: Path, s3_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    url = s3_server.url(secrets.token_hex(8))
    open_store(url).put("raw/a.txt", b"some text of an object")
    for named, message in (
        ([f"{url}/raw/a.txt", f"{url}/raw"], "is named twice"),
        ([f"{url}/nothing"], "no file matches"),
        ([str(tmp_path / "nothing")], "no file matches"),
    ):
        with pytest.raises(CorpusError, match=message):
            place_named_files(named, recipe_of_files(named, OUTPUT), str(tmp_path / "out"))
