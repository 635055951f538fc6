"""``phalanx score`` on a finished run: what it reads, prints and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from phalanx_serve.cli.scoring import score_command


def scored(folder: Path, result: dict[str, object], content: str | bytes, *options: str) -> Result:
    (folder / "given").write_bytes(content if isinstance(content, bytes) else content.encode())
    place = folder / str(result["run_dir"])
    return CliRunner().invoke(score_command, [str(place), str(folder / "given"), *options])


def test_a_text_and_its_tokens_have_the_same_line(folder: Path, result: dict[str, object]) -> None:
    plain = scored(folder, result, "ab cd")
    assert plain.exit_code == 0, plain.output
    assert plain.stdout.startswith("text 1: 4 tokens scored, sum -")
    assert "bits per byte" in plain.output
    lines = scored(folder, result, '{"text": "ab cd"}\n\n{"tokens": [97, 98, 32, 99, 100]}\n')
    first, second, together = lines.stdout.splitlines()
    assert first == plain.stdout.rstrip("\n")
    assert second == first.replace("text 1", "text 2")
    total = 2 * float(first.split("sum ")[1].split(",")[0])
    assert together.startswith(f"all 2 texts: 8 tokens scored, sum {total:.5f}")
    assert together.endswith(first.rsplit(", ", 1)[1])


def test_objects_have_every_log_probability_and_the_step(folder: Path, result: dict[str, object]) -> None:
    newest = json.loads(scored(folder, result, "ab cd", "--json").stdout)
    assert newest["tokens"] == [97, 98, 32, 99, 100]
    assert len(newest["log_probs"]) == 4
    assert newest["sum"] == pytest.approx(sum(newest["log_probs"]))
    assert newest["step"] == 6
    assert newest["note"] == "", "the trainer's arithmetic is that of scores"
    assert newest["numerics_id"].startswith("exact-float32-")
    earlier = json.loads(scored(folder, result, "ab cd", "--json", "--step", "3").stdout)
    assert earlier["step"] == 3
    assert earlier["log_probs"] != newest["log_probs"]


def test_texts_are_read_from_standard_input(folder: Path, result: dict[str, object]) -> None:
    expected = scored(folder, result, '{"tokens": [97, 98, 99]}').output
    place = str(folder / str(result["run_dir"]))
    done = CliRunner().invoke(score_command, [place, "-"], input='{"tokens": [97, 98, 99]}\n')
    assert (done.exit_code, done.output) == (0, expected)


def test_a_file_without_an_end_is_refused(folder: Path, result: dict[str, object]) -> None:
    refused = CliRunner().invoke(score_command, [str(folder / str(result["run_dir"])), "/dev/zero"])
    assert refused.exit_code == 1
    assert "more than 268,435,456 bytes" in refused.output


def test_another_format_than_the_runs_is_noted(folder: Path, result: dict[str, object]) -> None:
    done = scored(folder, result, "ab cd", "--dtype", "bfloat16")
    assert done.exit_code == 0
    assert "in fp32 (precision.compute)" in done.stderr


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is empty"),
        ("a", "text 1 is one token"),
        ("abcde" * 5, "text 1 has 25 tokens, and the run was trained on sequences of 24"),
        ('{"tokens": [1, 400000]}', "token id 400000 is outside the model's vocabulary"),
        ('{"text": "ab"}\n{"words": "ab"}', "line 2: give"),
        ('{"txt": "ab"}', "line 1: an object with 'txt': give"),
        ('{"text": "ab", "text": "cd"}', "line 1: key 'text' is there twice"),
        ('{"text": "ab"}\n{"text": "ab"', "line 2: not JSON (Expecting"),
        ('{"text": "ab"}\n{"tokens": []}', "line 2: the text is empty"),
        ('{"text": "ab"}\n{"tokens": [true, 1]}', "line 2: give"),
        (b"ab\xff", "is not UTF-8 at byte 2"),
    ],
)
def test_what_cannot_be_scored_is_named(
    folder: Path, result: dict[str, object], content: str | bytes, said: str
) -> None:
    done = scored(folder, result, content)
    assert done.exit_code == 1
    assert said in done.output


def test_a_run_without_checkpoints_says_so(folder: Path, result: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes((folder / str(result["run_dir"]) / "run.toml").read_bytes())
    (tmp_path / "given").write_text("ab cd")
    done = CliRunner().invoke(score_command, [str(tmp_path), str(tmp_path / "given")])
    assert done.exit_code == 1
    assert "holds no checkpoints" in done.output


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_streamed_weights_and_packs_score_by_the_bits_of_the_run(
    folder: Path, result: dict[str, object], tmp_path: Path, dtype: str
) -> None:
    content = '{"text": "ab cd"}\n{"text": "dc ba ab"}\n'
    expected = scored(folder, result, content, "--json", "--dtype", dtype).stdout
    assert scored(folder, result, content, "--json", "--dtype", dtype, "--stream").stdout == expected
    pack = folder / str(result["run_dir"]) / "packs" / f"step-00000006-{dtype}.pack"
    (tmp_path / "given").write_text(content)
    alone = CliRunner().invoke(
        score_command, [str(pack), str(tmp_path / "given"), "--json", "--dtype", dtype]
    )
    assert alone.stdout == expected


def test_memory_that_scoring_does_not_fit_into_is_refused_with_what_would_do(
    folder: Path, result: dict[str, object]
) -> None:
    done = scored(folder, result, "ab cd", "--stream", "--memory", "1MiB")
    assert done.exit_code == 1
    assert "bytes of memory" in done.output
    assert "--rows" not in done.output
    assert scored(folder, result, "ab cd", "--memory", "1MiB").exit_code == 2
