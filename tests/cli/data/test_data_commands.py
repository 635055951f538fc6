"""What ``phalanx data`` says of a run's order, as a user sees it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from parity.llama3_folder import save_tokenizer
from phalanx.cli.data.order import where_lines
from phalanx_process import RUN_FILE, last_json, run
from tiny_runs import make_dataset


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run file of two sources, and the finished run of it, ``runs/mixed``."""
    place = tmp_path_factory.mktemp("mixed")
    sources = "\n".join(
        f'[[data.sources]]\nname = "{name}"\npath = "{make_dataset(place / name, name).name}"\nweights = {weights}\nepochs = 2'
        for name, weights in (("web", [0.75, 0.5]), ("math", [0.25, 0.5]))
    )
    text = RUN_FILE.replace('path = "{data}"', f"stages = [0, 4]\n{sources}").replace(
        "steps = 20", "steps = 6"
    )
    (place / "mixed.toml").write_text(text)
    last_json(run(["train", "mixed.toml", "--ranks", "2", "--run-dir", "runs/mixed", "--json"], place))
    return place


def test_a_mixture_is_shown_with_its_shares_and_epochs(place: Path) -> None:
    shown = run(["data", "mixture", "mixed.toml"], place).stdout
    assert "steps 1 to 4\n  math                   25.0000%\n  web                    75.0000%\n" in shown
    assert "from step 5\n" in shown
    facts = json.loads(run(["data", "mixture", "mixed.toml", "--json"], place).stdout)
    assert [source["drawn"] for source in facts["sources"]] == [32, 64]


def test_a_run_file_that_continues_a_run_begins_where_its_newest_checkpoint_ends(place: Path) -> None:
    named = ["--set", "checkpoint.init_from=runs/mixed", "--set", "checkpoint.init_with=training"]
    child = ["data", "order", "mixed.toml", "--json", "--set", "train.steps=8", *named]
    begins = json.loads(run([*child, "--step", "7"], place).stdout)
    later = json.loads(run(["data", "order", "runs/mixed", "--step", "7", "--json"], place).stdout)
    assert begins == later
    assert "first own step is 7" in run([*child, "--step", "6"], place).stderr


@pytest.mark.parametrize(
    ("start", "message"),
    [
        ("s3://bucket/run", "needs the run directory of the parent, and s3://bucket/run is in a store"),
        ("s3://bucket/run/step-00000006", "needs the run directory of the parent"),
        ("runs/gone", "there is no checkpoint in runs/gone"),
        ("gone/checkpoints/step-00000006", "gone/checkpoints/step-00000006 is not there"),
    ],
)
def test_a_run_file_that_continues_what_is_not_there_is_refused_and_makes_no_folder(
    place: Path, start: str, message: str
) -> None:
    before = sorted(place.rglob("*"))
    named = ["--set", f"checkpoint.init_from={start}", "--set", "checkpoint.init_with=training"]
    for command in (["order", "mixed.toml", "--step", "7"], ["where", "mixed.toml", "--record", "1"]):
        refused = run(["data", *command, *named], place)
        assert refused.returncode == 1
        assert message in refused.stderr
        assert "Traceback" not in refused.stderr
    assert sorted(place.rglob("*")) == before


def test_a_mixture_that_reads_too_much_says_from_which_step_and_is_not_trained(place: Path) -> None:
    longer = ["--set", "train.steps=2000"]
    assert (
        "more than data.sources.math.epochs from step"
        in run(["data", "mixture", "mixed.toml", *longer], place).stdout
    )
    refused = run(["train", "mixed.toml", *longer], place)
    assert refused.returncode == 1
    assert "source 'math' would be read" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_step_is_found_again_from_each_of_its_records(place: Path) -> None:
    order = json.loads(run(["data", "order", "mixed.toml", "--step", "5", "--json"], place).stdout)
    assert [one["slot"] for one in order["samples"]] == [slot for slot in range(8) for _ in range(2)]
    one = order["samples"][3]
    where = ["data", "where", "runs/mixed", "--source", one["source"], "--record", str(one["record"])]
    assert f"record {one['record']}: step 5" in run(where, place).stdout
    found = json.loads(run([*where, "--json"], place).stdout)
    assert found == {"source": one["source"], "records": [{"record": one["record"], "steps": [5]}]}


def test_of_a_step_behind_the_runs_end_that_is_said(place: Path) -> None:
    shown = run(["data", "order", "mixed.toml", "--step", "7"], place)
    assert "slot 0" in shown.stdout
    assert "the run ends after step 6" in shown.stderr


def test_the_samples_of_a_step_are_shown_as_text_with_their_documents(place: Path) -> None:
    order = json.loads(run(["data", "order", "runs/mixed", "--step", "5", "--json"], place).stdout)["samples"]
    shown = json.loads(run(["data", "show", "runs/mixed", "--step", "5", "--json"], place).stdout)["samples"]
    assert [{name: one[name] for name in order[0]} for one in shown] == order
    for one in shown:
        stored = run(
            ["data", "show", one["source"], "--record", str(one["record"]), "--seq-len", "24"], place
        ).stdout
        assert stored.strip() == one["text"].strip()
        for document in one["documents"]:
            where = [
                "data",
                "where",
                "runs/mixed",
                "--source",
                one["source"],
                "--document",
                str(document),
                "--json",
            ]
            found = json.loads(run(where, place).stdout)["records"]
            assert one["record"] in [there["record"] for there in found]


def test_a_slot_of_a_step_is_shown_on_a_screen(place: Path) -> None:
    lines = run(["data", "show", "runs/mixed", "--step", "5", "--slot", "3"], place).stdout.splitlines()
    assert len(lines) == 4, "two samples, each where it is and its text"
    assert lines[0].startswith("slot 3 sample 70 ")
    assert max(len(line) for line in lines[1::2]) <= 80


def test_the_early_steps_of_a_child_run_are_its_parents(place: Path) -> None:
    child = [
        "train",
        "runs/mixed",
        "--from",
        "6",
        "--set",
        "train.steps=8",
        "--run-dir",
        "runs/child",
        "--json",
    ]
    last_json(run(child, place))
    early = json.loads(run(["data", "show", "runs/child", "--step", "5", "--json"], place).stdout)
    assert early["run"].endswith("runs/mixed")
    own = json.loads(run(["data", "show", "runs/child", "--step", "7", "--json"], place).stdout)
    assert own["run"] == "runs/child"
    assert own["samples"][0]["sample"] == 6 * 16


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["runs/mixed", "--step", "7"], "ends after step 6"),
        (["runs/mixed", "--step", "1", "--slot", "8"], "there is no slot 8: the run has 8, from 0"),
        (["runs/mixed", "--slot", "1"], "add --step N"),
        (["runs/mixed", "--step", "1", "--record", "1"], "are about a dataset"),
        (["web", "--step", "1"], "web is no run directory"),
    ],
)
def test_what_no_step_has_is_not_shown(place: Path, words: list[str], says: str) -> None:
    done = run(["data", "show", *words], place)
    assert done.returncode != 0
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_a_document_is_found_by_its_number(place: Path) -> None:
    shown = run(["data", "where", "runs/mixed", "--source", "web", "--document", "0"], place)
    assert shown.stdout.startswith(("record 0: ", "records 0 to "))


def test_records_that_no_step_trains_on_are_named_together() -> None:
    steps = {4: [], 5: [], 6: [31, 1_200], 7: [8], 8: []}
    assert list(where_lines(steps)) == [
        "records 4 to 5: no step of this run",
        "record 6: steps 31, 1,200",
        "record 7: step 8",
        "record 8: no step of this run",
    ]
    assert len(list(where_lines({}))) == 1, "nothing is no answer"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["where", "runs/mixed", "--source", "wet", "--record", "1"],
            "no source is called 'wet'; there are: math, web",
        ),
        (
            ["where", "runs/mixed", "--source", "wet", "--document", "1"],
            "no source is called 'wet'; there are: math, web",
        ),
        (["where", "runs/mixed", "--source", "web"], "give --record or --document"),
        (["mixture", "gone.toml"], "there is no file gone.toml"),
    ],
)
def test_what_cannot_be_answered_is_said_without_a_traceback(
    words: list[str], says: str, place: Path
) -> None:
    done = run(["data", *words], place)
    assert done.returncode != 0
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_a_flipped_byte_ends_training_with_the_file_and_the_remedy_and_is_mended_by_a_copy(
    tmp_path: Path,
) -> None:
    good = make_dataset(tmp_path / "good")
    bad = Path(shutil.copytree(good, tmp_path / "bad"))
    content = bytearray((bad / "train-00000.bin").read_bytes())
    content[8193] ^= 1
    (bad / "train-00000.bin").write_bytes(content)
    (tmp_path / "tiny.toml").write_text(RUN_FILE.format(data=bad))
    command = ["train", "tiny.toml", "--ranks", "2", "--set", "train.steps=6", "--run-dir", "run", "--json"]
    done = run(command, tmp_path)
    assert done.returncode != 0
    assert f"{bad}/train-00000.bin: bytes 8192 to 16384 are not what was written" in done.stderr
    assert "copy the file again from an intact copy" in done.stderr
    assert "Traceback" not in done.stderr
    shutil.copyfile(good / "train-00000.bin", bad / "train-00000.bin")
    mended = last_json(run(command, tmp_path))
    undisturbed = run(["train", "tiny.toml", "--ranks", "1", "--set", "train.steps=6", "--json"], tmp_path)
    assert mended["weights_sha256"] == last_json(undisturbed)["weights_sha256"]


def test_block_sums_that_lack_are_asked_for_and_written(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "old")
    for file in dataset.glob("*.sums"):
        file.unlink()
    assert "2 shards have no block sums" in run(["data", "verify", "old"], tmp_path).stdout
    assert "block sums" not in run(["data", "verify", "old", "--write-sums"], tmp_path).stdout
    assert len(list(dataset.glob("*.sums"))) == 2


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with conversations, and with a tokenizer that has a chat template."""
    place = tmp_path_factory.mktemp("chats")
    save_tokenizer(place / "model")
    turns = [{"role": "user", "content": "cat"}, {"role": "assistant", "content": "dog"}]
    lines = [json.dumps({"messages": turns * (1 + number % 2)}) for number in range(20)]
    (place / "chats.jsonl").write_text("\n".join(lines))
    (place / "spelled.jsonl").write_text(lines[0].replace("cat", "<|eot_id|>") + "\n" + "\n".join(lines))
    return place


def test_conversations_are_prepared_and_a_record_shows_what_is_learned(chats: Path) -> None:
    options = ["--layout", "chat", "--tokenizer", "model", "--seq-len", "48", "--out", "data"]
    facts = last_json(run(["data", "prepare", "chats.jsonl", *options, "--json"], chats))
    assert (facts["conversations"], facts["left_out_conversations"]) == (10, 10)
    shown = run(["data", "show", "data", "--record", "0"], chats).stdout
    frame = "<|start_header_id|>{}<|end_header_id|>\n\n"
    user, answer = frame.format("user") + "cat<|eot_id|>", frame.format("assistant") + "⟦dog<|eot_id|>⟧"
    assert shown.startswith("<|begin_of_text|>" + user + answer + "<|end_of_text|>")
    pieces = json.loads(run(["data", "show", "data", "--record", "0", "--json"], chats).stdout)["pieces"]
    assert [piece["text"] for piece in pieces if piece["learned"]] == ["dog<|eot_id|>"]


def test_conversations_that_are_left_out_are_a_warning_with_the_remedy(chats: Path) -> None:
    options = ["--layout", "chat", "--tokenizer", "model", "--seq-len", "48", "--out", "short"]
    said = run(["data", "prepare", "chats.jsonl", *options], chats).stdout
    assert "warning: 10 of 20 conversations left out, being longer than a record of 48 tokens" in said
    assert "a larger --seq-len or --too-long cut" in said


def test_a_dataset_without_a_conversation_is_refused_and_nothing_is_written(chats: Path) -> None:
    options = ["--layout", "chat", "--tokenizer", "model", "--seq-len", "4", "--out", "none"]
    refused = run(["data", "prepare", "chats.jsonl", *options], chats)
    assert refused.returncode == 1
    assert (
        "no conversation is left to train on: 20 are bad or longer than a record of 4 tokens"
        in refused.stderr
    )
    assert not (chats / "none").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["chats.jsonl", "--layout", "chat", "--seq-len", "48"],
            "needs special tokens: add --tokenizer FOLDER",
        ),
        (["chats.jsonl", "--layout", "chat", "--tokenizer", "model"], "add --seq-len"),
        (["chats.jsonl", "--too-long", "cut"], "add --layout chat"),
        (
            ["--layout", "chat", "--tokenizer", "model", "--seq-len", "48", "model/tokenizer.json"],
            "is text, not rows of conv",
        ),
        (
            ["--layout", "chat", "--tokenizer", "model", "--seq-len", "48", "spelled.jsonl"],
            "message 1 spells the special token",
        ),
        (
            [
                "--layout",
                "chat",
                "--tokenizer",
                "model",
                "--seq-len",
                "48",
                "--text-field",
                "turns",
                "chats.jsonl",
            ],
            "has no field 'turns'; it has: messages",
        ),
    ],
)
def test_what_is_wrong_with_conversations_is_said_with_the_remedy(
    words: list[str], message: str, chats: Path
) -> None:
    refused = run(["data", "prepare", *words, "--out", "refused"], chats)
    assert refused.returncode != 0
    assert message in " ".join(refused.stderr.split())
    assert "Traceback" not in refused.stderr
    assert not (chats / "refused").exists()


@pytest.mark.parametrize(
    ("documents", "length", "seq_len", "warned"),
    [(200, 3, 256, ()), (3, 100, 128, ()), (6, 100, 128, ("documents are few",))],
)
def test_the_short_last_record_of_packed_documents_is_no_sign_of_too_few(
    tmp_path: Path, documents: int, length: int, seq_len: int, warned: tuple[str, ...]
) -> None:
    line = json.dumps({"text": "x" * length}) + "\n"
    (tmp_path / "texts.jsonl").write_text(line * documents)
    pack = ("--tokenizer", "bytes", "--pack", "--seq-len", str(seq_len), "--out", "packed")
    shown = run(["data", "prepare", "texts.jsonl", *pack], tmp_path).stdout
    assert "less than one sequence" not in shown
    assert [text for text in ("documents are few",) if text in shown] == list(warned)
