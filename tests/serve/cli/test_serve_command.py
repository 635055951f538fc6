"""What cannot be served is refused with its remedy, before anything is computed."""

from __future__ import annotations

import tomllib
from pathlib import Path

import click
import pytest
import tomli_w
from click.testing import CliRunner

from parity.llama3_folder import save_llama3
from phalanx.checkpoint.interop.huggingface.convert import import_hf
from phalanx.cli.weights import hash_command
from phalanx.data.tokenizers.tokenizer import BytesTokenizer
from phalanx_serve.cli import generate_command, pack_command, serve_command
from phalanx_serve.cli.scoring import score_command
from phalanx_serve.traffic.events import ServeError
from phalanx_serve.workers import service
from serve.packed_runs import DENSE, make_run


def test_what_only_a_run_directory_can_do_is_refused_of_a_published_model(tmp_path: Path) -> None:
    folder = tmp_path / "Llama 3"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (tmp_path / "token").write_text("0123456789abcdef")
    pack = f"phalanx pack '{folder}' --out NEW.pack"
    imported = f"phalanx import '{folder}' --out RUN_DIR"
    far = ["--token-file", str(tmp_path / "token")]
    for options, remedy in (
        (["--stream"], pack),
        (["--follow", "recompute"], "leave out --follow"),
        (["--memory", "0"], "--memory 0 has no room"),
        (["--pipeline", "2", "--stages-at", "127.0.0.1:0", *far], imported),
        (["--join", "127.0.0.1:1", *far], imported),
    ):
        done = CliRunner().invoke(serve_command.command, [str(folder), *options], terminal_width=1000)
        assert (done.exit_code, remedy in done.output) == (2, True), done.output


def test_a_published_model_without_its_weights_is_refused_by_the_file_that_lacks(tmp_path: Path) -> None:
    save_llama3(tmp_path / "llama3")
    (tmp_path / "llama3" / "model.safetensors").unlink()
    for command, options in (
        (serve_command.command, ["--port", "0"]),
        (score_command, ["-"]),
        (generate_command.command, []),
    ):
        done = CliRunner().invoke(command, [str(tmp_path / "llama3"), *options], input="a text")
        assert (done.exit_code, "model.safetensors: is missing" in done.output) == (1, True), done.output


def test_a_published_model_is_generated_from_scored_hashed_and_packed_as_its_import_is(
    tmp_path: Path,
) -> None:
    folder, run = tmp_path / "llama3", tmp_path / "run"
    save_llama3(folder)
    import_hf(folder, run)
    (tmp_path / "texts.jsonl").write_text('{"text": "the cat and the dog"}\n{"tokens": [5, 6, 7]}\n')
    said: dict[Path, list[str]] = {}
    for place in (folder, run):
        said[place] = []
        for command, words in (
            (generate_command.command, ["--prompt", "the cat", "--tokens", "8", "--json"]),
            (
                generate_command.command,
                ["--prompt", "the cat", "--tokens", "8", "--dtype", "bfloat16", "--json"],
            ),
            (score_command, [str(tmp_path / "texts.jsonl"), "--json"]),
            (hash_command, []),
            (pack_command.command, ["--out", str(tmp_path / f"{place.name}.pack")]),
        ):
            done = CliRunner().invoke(command, [str(place), *words])
            assert done.exit_code == 0, done.output
            said[place].append(done.stdout.replace(str(place), "PLACE"))
    ours, theirs = said[folder], said[run]
    assert ours[:3] == theirs[:3]
    assert ours[3].split()[0] == theirs[3].split()[0]
    assert [line for line in ours[4].splitlines() if "packed" not in line] == [
        line for line in theirs[4].splitlines() if "packed" not in line
    ]


def test_a_run_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    (tmp_path / "quickstart-1").mkdir()
    (tmp_path / "quickstart-1" / "run.toml").write_text("")
    done = CliRunner().invoke(serve_command.command, [str(tmp_path / "quickstart-2"), "--port", "0"])
    assert done.exit_code == 1
    assert f"the newest run there: {tmp_path / 'quickstart-1'}" in done.output


@pytest.mark.parametrize(("degrees", "device"), [("prefill:2", "cpu"), ("1", "auto")])
def test_workers_of_all_roles_have_the_cpu_where_those_of_one_role_divide_the_model(
    degrees: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def begin(found: service.Service, _tell: object) -> None:
        asked.extend(found.task_of(role).served.device for role in found.roles)
        raise ServeError("no more is looked at")

    monkeypatch.setattr("phalanx_serve.served.opened.gpus", lambda: 2)
    monkeypatch.setattr(service, "read_model_text", lambda *_: None)  # there is no tokenizer
    monkeypatch.setattr(service, "RouterClient", begin)
    words = [str(make_run(tmp_path / "run", DENSE)), "--port", "0", "--numerics", "fast"]
    done = CliRunner().invoke(
        serve_command.command, [*words, "--workers", "prefill:1,decode:1", "--tensor", degrees]
    )
    assert asked == [device, device], done.output
    assert "also do what the other role would" not in done.output
    alone = CliRunner().invoke(serve_command.command, [*words, "--workers", "prefill:1"])
    assert "all workers are prefill workers: they also do what the other role would" in alone.output
    unnamed = CliRunner().invoke(serve_command.command, [*words, "--name", ""])
    assert (unnamed.exit_code, "--name is empty" in unnamed.output) == (2, True)
    assert f"computing on {'cpu' if device == 'cpu' else 'cuda:0, cuda:1'}\n" in done.output


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (serve_command.command, ["--port", "0"]),
        (generate_command.command, ["--prompt", "a"]),
        (score_command, ["-"]),
    ],
    ids=["serve", "generate", "score"],
)
def test_code_that_a_run_directory_brings_along_is_not_run_unasked(
    command: click.Command, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", DENSE)
    table = tomllib.loads((run / "run.toml").read_text())
    module = f"stranger_of_{command.name}"
    table["model"]["factory"] = f"{module}:make"
    (run / "run.toml").write_text(tomli_w.dumps(table))
    (run / "tokenizer").mkdir()
    BytesTokenizer().save(run / "tokenizer")
    (run / f"{module}.py").write_text("open('has_run', 'w')\ndef make(spec): return 3\n")
    monkeypatch.chdir(run)
    refused = CliRunner().invoke(command, [".", *words], input='{"tokens": [5, 6]}')
    assert refused.exit_code == 1, refused.output
    assert f"names code, {module}:make in" in refused.output
    assert "--trust-code" in refused.output
    assert not (run / "has_run").exists()
    trusted = CliRunner().invoke(command, [".", *words, "--trust-code"], input='{"tokens": [5, 6]}')
    assert (trusted.exit_code, (run / "has_run").exists()) == (1, True), trusted.output
    assert isinstance(trusted.exception, SystemExit), "the mistake in the code is told in a line"
