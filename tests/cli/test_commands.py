"""The commands as a user sees them."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from phalanx_process import ENVIRONMENT, last_json, run

Result = dict[str, Any]


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["--nodes", "1000"], "parallel.ranks"),
        (["--nodes", "1", "--set", "fleet.min_nodes=3"], "fleet.min_nodes"),
        (["--spares", "1"], "--spares"),
    ],
)
def test_a_fleet_that_cannot_be_is_refused_in_a_few_lines_that_name_the_field(
    arguments: list[str], field: str, folder: Path
) -> None:
    done = run(["train", "tiny.toml", *arguments], folder)
    assert done.returncode != 0
    assert field in done.stderr
    assert "Traceback" not in done.stderr


def test_training_prints_one_json_object_on_its_last_line(result: Result) -> None:
    assert {"run_dir", "step", "loss", "tokens_per_s", "mfu", "weights_sha256"} <= result.keys()
    assert result["step"] == 6


def test_the_hash_from_disk_is_the_one_that_training_printed(folder: Path, result: Result) -> None:
    for place in (
        result["run_dir"],
        f"{result['run_dir']}/checkpoints",
        f"{result['run_dir']}/checkpoints/step-00000006",
    ):
        assert (
            last_json(run(["hash", str(place), "--json"], folder))["weights_sha256"]
            == result["weights_sha256"]
        )


def test_a_finished_run_started_again_gets_a_folder_of_its_own_and_the_same_weights(
    folder: Path, result: Result
) -> None:
    again = last_json(run(["train", "tiny.toml", "--ranks", "1", "--set", "train.steps=6", "--json"], folder))
    assert again["run_dir"] == f"{result['run_dir']}-2"
    assert again["weights_sha256"] == result["weights_sha256"]


def test_a_finished_run_in_a_named_folder_is_not_trained_again(folder: Path, result: Result) -> None:
    command = ["train", "tiny.toml", "--set", "train.steps=6", "--run-dir", str(result["run_dir"]), "--json"]
    done = run(command, folder)
    assert "nothing to do" in done.stderr
    assert last_json(done)["weights_sha256"] == result["weights_sha256"]


def test_a_folder_of_another_run_is_refused_with_what_differs(folder: Path, result: Result) -> None:
    command = ["train", "tiny.toml", "--set", "train.steps=6", "--run-dir", str(result["run_dir"])]
    done = run([*command, "--set", "optimizer.lr=0.5"], folder)
    assert done.returncode == 1
    assert "belongs to another run" in done.stderr
    assert "optimizer.lr: 0.01 != 0.5" in done.stderr
    assert re.search(rf"phalanx train {result['run_dir']} --from [1-5] --set optimizer\.lr=0\.5", done.stderr)
    assert "Traceback" not in done.stderr


def test_a_run_is_made_longer_by_the_command_that_the_refusal_names_and_its_lineage_is_shown(
    folder: Path, result: Result
) -> None:
    run_dir = str(result["run_dir"])
    refused = run(["train", run_dir, "--set", "train.steps=8"], folder).stderr
    command = refused.splitlines()[-1].split()
    assert command[:4] == ["phalanx", "train", run_dir, "--from"]
    longer = last_json(run([*command[1:], "--ranks", "1", "--json"], folder))
    assert longer["step"] == 8
    child = str(longer["run_dir"])
    assert last_json(run(["train", child, "--json"], folder))["weights_sha256"] == longer["weights_sha256"]
    shown = f"continues from step 6 of {folder / run_dir}"
    assert shown in run(["status", child], folder).stdout
    assert shown in run(["hash", child], folder).stderr
    listed = json.loads(run(["runs", "--json"], folder).stdout)
    (found,) = [entry for entry in listed if entry["path"] == child]
    assert json.loads(run(["runs", child, "--json"], folder).stdout) == [found]
    assert f"step 6 of {Path(run_dir).name}\n" in run(["runs"], folder).stdout
    assert found["lineage"][0]["weights_sha256"] == result["weights_sha256"]


def test_three_mistakes_in_a_run_file_are_three_lines(folder: Path) -> None:
    bad = folder / "bad.toml"
    bad.write_text('[train]\nstepz = 5\nslots = 7\n[optimizer]\nlr = "fast"\n')
    done = run(["train", "bad.toml"], folder)
    assert done.returncode == 1
    assert "bad.toml: 3 problems" in done.stderr
    assert "train.stepz: there is no such field (did you mean steps?)" in done.stderr
    assert "optimizer.lr: 'fast' is not a number" in done.stderr
    assert "train.slots: a batch of 32 sequences cannot be divided into 7 equal slots" in done.stderr
    assert "Traceback" not in done.stderr


def test_more_ranks_than_slots_is_a_mistake_that_says_so(folder: Path) -> None:
    done = run(["train", "tiny.toml", "--ranks", "9"], folder)
    assert done.returncode == 1
    assert "9 data-parallel ranks for 8 slots" in done.stderr


def test_what_keeps_ranks_from_training_is_told_before_any_is_started(folder: Path, result: Result) -> None:
    other_model = ["--set", f"checkpoint.init_from={result['run_dir']}", "--set", "model.layers=3"]
    no_sink = ["--set", 'observe.sinks=["mlflow"]'] if find_spec("mlflow") is None else []
    done = run(["train", "tiny.toml", *other_model, *no_sink, "--set", "train.seq_len=1000000"], folder)
    assert done.returncode == 1
    assert "train.seq_len" in done.stderr
    assert "blocks.2.attention.query.weight is missing" in done.stderr
    assert not no_sink or "pip install mlflow" in done.stderr
    assert "rank" not in done.stdout


def test_data_that_is_not_there_is_named_with_the_command_that_makes_it(folder: Path) -> None:
    done = run(["train", "tiny.toml", "--set", "data.path=nowhere"], folder)
    assert done.returncode == 1
    assert "phalanx data prepare TEXT... --out nowhere" in done.stderr


def test_data_is_prepared_from_text_and_verified(folder: Path) -> None:
    texts = folder / "texts"
    texts.mkdir()
    for n in range(30):
        (texts / f"{n}.txt").write_text(f"text number {n}, and again {n * n}\n" * 50)
    done = run(["data", "prepare", "texts", "--out", "prepared", "--vocab-size", "300", "--json"], folder)
    facts = last_json(done)
    assert facts["train_tokens"] > 0
    assert facts["vocab_size"] <= 300
    assert run(["data", "verify", "prepared"], folder).returncode == 0
    (shard,) = (folder / "prepared").glob("train*.bin")
    content = bytearray(shard.read_bytes())
    content[3] ^= 1
    shard.write_bytes(content)
    done = run(["data", "verify", "prepared"], folder)
    assert done.returncode == 1
    assert shard.name in done.stderr


def test_a_checkpoint_of_another_tokenizer_is_refused_before_any_rank_starts(
    folder: Path, result: Result
) -> None:
    (folder / "prose.txt").write_text("the quick brown fox\n" * 200)
    prepared = run(["data", "prepare", "prose.txt", "--out", "prose", "--vocab-size", "270"], folder)
    assert prepared.returncode == 0
    begin = ["--set", f"checkpoint.init_from={result['run_dir']}"]
    done = run(["train", "tiny.toml", *begin, "--set", "data.path=prose"], folder)
    assert done.returncode == 1
    assert "checkpoint.init_from" in done.stderr
    assert f"{result['run_dir']}/tokenizer/tokenizer.json --out FOLDER" in done.stderr


@pytest.fixture(scope="module")
def long_text(folder: Path) -> str:
    """A folder with a text whose preparation takes long enough for a signal on a loaded machine."""
    (folder / "long").mkdir()
    (folder / "long/one.txt").write_text("some words, and more of them\n" * 4_000_000)
    return "long"


def test_a_preparation_ended_by_sigterm_leaves_nothing_behind(folder: Path, long_text: str) -> None:
    words = ["data", "prepare", long_text, "--out", "long_tokens", "--tokenizer", "bytes"]
    command = [sys.executable, "-m", "phalanx", *words]
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    assert process.stderr is not None
    while not list(folder.glob(".long_tokens.partial-*")):
        assert process.poll() is None
        time.sleep(0.001)
    process.terminate()
    assert process.wait(240) == 128 + signal.SIGTERM
    assert not list(folder.glob(".long_tokens.partial-*"))


def test_a_preparation_ended_by_ctrl_c_leaves_nothing_behind_and_says_so(
    folder: Path, long_text: str
) -> None:
    words = ["data", "prepare", long_text, "--out", "pressed_tokens", "--tokenizer", "bytes"]
    process = subprocess.Popen(
        [sys.executable, "-m", "phalanx", *words],
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        # In the background of a shell script the signal is ignored, and what it starts inherits that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while not list(folder.glob(".pressed_tokens.partial-*")):
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    _, shown = process.communicate(timeout=240)
    assert process.returncode == 130
    assert "pressed_tokens is as it was, and nothing half-written is left" in shown
    assert not list(folder.glob("*pressed_tokens*"))
    assert run(words, folder).returncode == 0


def test_files_of_many_formats_are_prepared_together_and_said(folder: Path) -> None:
    mixed = folder / "mixed"
    mixed.mkdir()
    (mixed / "mail.jsonl").write_text('{"text": "a mail"}\n{"text": "another mail"}\nno mail\n')
    (mixed / "prose.txt").write_text("prose " * 100)
    words = ["data", "prepare", "mixed", "--out", "mixed_tokens", "--tokenizer", "bytes"]
    stopped = run(words, folder)
    assert stopped.returncode == 1
    assert "mail.jsonl, line 3: is not JSON" in stopped.stderr
    done = run([*words, "--on-bad", "skip"], folder)
    assert "2 files: 1 jsonl (2 documents), 1 text (1 document)" in done.stdout
    assert "left out: mixed/mail.jsonl, line 3: is not JSON" in done.stderr
    facts = last_json(run([*words, "--skip-bad", "--json"], folder))
    assert facts["read"] == {"jsonl": {"files": 1, "documents": 2}, "text": {"files": 1, "documents": 1}}
    assert (facts["left_out"], facts["left_out_count"]) == (["mixed/mail.jsonl, line 3"], 1)


def test_text_is_generated_and_the_same_for_a_seed(folder: Path, result: Result) -> None:
    command = ["generate", str(result["run_dir"]), "--prompt", "a", "--tokens", "20", "--json"]
    first, second = last_json(run(command, folder)), last_json(run(command, folder))
    assert first == second
    assert first["prompt"] == "a"


def test_checkpoints_are_listed_and_verified_and_a_flipped_byte_is_found(
    folder: Path, result: Result
) -> None:
    run_dir = "damaged"
    ignored = shutil.ignore_patterns("step-00000003")
    shutil.copytree(folder / str(result["run_dir"]), folder / run_dir, ignore=ignored)
    listed = last_json(run(["checkpoint", "list", run_dir, "--json"], folder))["checkpoints"]
    assert [row["step"] for row in listed] == [6]
    assert run(["checkpoint", "verify", run_dir], folder).returncode == 0
    file = folder / listed[0]["path"] / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 2
    file.write_bytes(content)
    done = run(["checkpoint", "verify", run_dir], folder)
    assert done.returncode == 1
    assert "rank-00000.safetensors" in done.stdout
    assert run(["hash", run_dir], folder).returncode == 1


def test_weights_go_to_hugging_face_and_back_unchanged(folder: Path, result: Result) -> None:
    assert run(["export", str(result["run_dir"]), "--to", "hf", "exported"], folder).returncode == 0
    imported = last_json(run(["import", "exported", "--out", "imported", "--json"], folder))
    assert imported["weights_sha256"] == result["weights_sha256"]
    nearly_still = ["--ranks", "1", "--set", "train.steps=1", "--set", "optimizer.lr=1e-30"]
    command = ["train", "tiny.toml", *nearly_still, "--set", "checkpoint.init_from=imported", "--json"]
    started = last_json(run(command, folder))
    assert started["held_out_loss"] == pytest.approx(result["held_out_loss"], rel=1e-5)


def test_weights_go_to_pytorchs_distributed_checkpoint_and_back_unchanged(
    folder: Path, result: Result
) -> None:
    done = run(["checkpoint", "export", str(result["run_dir"]), "--to", "dcp", "as-dcp"], folder)
    assert done.returncode == 0, done.stderr
    model = ["--model", str(result["run_dir"]), "--out", "from-dcp", "--json"]
    imported = last_json(run(["import", "as-dcp", *model], folder))
    assert imported["weights_sha256"] == result["weights_sha256"]
    assert "left out: the optimizer's state" in imported["notes"][0]


def test_goodput_and_watch_are_drawn_from_the_events(folder: Path, result: Result) -> None:
    goodput = last_json(run(["goodput", str(result["run_dir"]), "--json"], folder))
    assert sum(goodput["buckets_ns"].values()) == goodput["held_ns"]
    shown = run(["watch", str(result["run_dir"]), "--once"], folder)
    assert "step 6/6" in shown.stdout


def test_a_model_is_shown_without_building_it(folder: Path) -> None:
    (folder / "big.toml").write_text('[model]\npreset = "llama3-405b"\n')
    facts = last_json(run(["show", "big.toml", "--json"], folder))
    assert facts["parameters"] == 405_853_388_800


def test_the_reference_shows_every_field_of_a_section(folder: Path) -> None:
    shown = run(["spec", "optimizer"], folder).stdout
    assert "lr = 0.001" in shown
    assert "Peak learning rate." in shown


def test_a_path_that_is_no_run_is_named(folder: Path) -> None:
    for command in ("hash", "goodput", "generate"):
        done = run([command, "nothing-here"], folder)
        assert done.returncode != 0
        assert "nothing-here" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_port_in_use_is_named_with_what_to_change(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        rank = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        done = subprocess.run(
            [sys.executable, "-m", "phalanx", "train", "tiny.toml"],
            cwd=folder,
            env={**ENVIRONMENT, **rank, "MASTER_PORT": str(taken.getsockname()[1])},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 1
    assert "in use by another program: set MASTER_PORT" in done.stderr
    assert "Traceback" not in done.stderr
