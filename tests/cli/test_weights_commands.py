"""Commands around an imported model, in this process: import, generate, export."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from parity.llama3_folder import save_llama3
from phalanx.cli.weights import export_command, import_command
from phalanx_serve.cli import generate_command


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    save_llama3(folder / "llama3")
    (folder / "llama3" / "README.md").write_text("# Llama")
    done = CliRunner().invoke(
        import_command, [str(folder / "llama3"), "--out", str(folder / "run"), "--json"]
    )
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["notes"] == []
    return folder / "run"


def generated(*arguments: object) -> Result:
    command = [*map(str, arguments), "--temperature", "0", "--tokens", "6"]
    return CliRunner().invoke(generate_command.command, command)


def test_an_answer_is_generated_to_a_message_from_a_run_or_a_checkpoint(imported: Path) -> None:
    plain = generated(imported, "--prompt", "the cat")
    assert plain.output.startswith("the cat")
    chat = [
        generated(place, "--prompt", "the cat", "--chat") for place in (imported, imported / "checkpoints")
    ]
    assert [done.exit_code for done in (plain, *chat)] == [0, 0, 0]
    assert chat[0].output == chat[1].output != plain.output
    step = generated(imported / "checkpoints" / "step-00000000", "--prompt", "the cat")
    assert step.output == plain.output


def test_a_model_without_a_tokenizer_or_template_says_so(
    imported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Here no dataset lies at the default data.path; the quickstart leaves one in a checkout.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    shutil.copy(imported / "run.toml", tmp_path / "run" / "run.toml")
    (tmp_path / "run" / "checkpoints").symlink_to(imported / "checkpoints")
    done = generated(tmp_path / "run", "--prompt", "a")
    assert done.exit_code == 1
    assert "has no tokenizer" in done.output
    (tmp_path / "run" / "tokenizer").symlink_to(imported / "tokenizer")
    done = generated(tmp_path / "run", "--prompt", "a", "--chat")
    assert done.exit_code == 1
    assert "there is no chat template" in done.output


def test_an_export_prints_what_it_leaves_out_and_takes_another_context(
    imported: Path, tmp_path: Path
) -> None:
    out = tmp_path / "hf"
    done = CliRunner().invoke(
        export_command, [str(imported), "--to", "hf", "--max-seq-len", "4096", str(out)]
    )
    assert done.exit_code == 0, done.output
    assert "note: left out of what was published: README.md" in done.output
    assert json.loads((out / "config.json").read_text())["max_position_embeddings"] == 4096


def test_a_folder_that_leads_to_itself_is_named(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    done = CliRunner().invoke(import_command, [str(tmp_path / "loop"), "--out", str(tmp_path / "run")])
    assert done.exit_code == 1
    assert "loop/config.json" in done.output
    done = CliRunner().invoke(import_command, [str(tmp_path / "loop")])
    assert (done.exit_code, type(done.exception)) == (1, SystemExit)
