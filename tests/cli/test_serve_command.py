"""What cannot be served is refused with its remedy, before anything is computed."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from phalanx.cli.weights import generate_command, score_command, serve_command
from phalanx.serve.engine.errors import EngineError
from phalanx.serve.workers import service
from serve.packed_runs import DENSE, make_run

COMMANDS: dict[str, tuple[click.Command, list[str]]] = {
    "serve": (serve_command.command, ["--port", "0"]),
    "serve by workers": (serve_command.command, ["--port", "0", "--workers", "2"]),
    "serve from disk": (serve_command.command, ["--port", "0", "--stream"]),
    "score": (score_command.command, ["-"]),
    "generate": (generate_command.command, []),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_folder_of_hugging_face_is_refused_with_the_command_that_imports_it(
    tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "Llama 3"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    command, options = COMMANDS[name]
    done = CliRunner().invoke(command, [str(folder), *options], input="a text")
    assert done.exit_code == 1
    assert f"phalanx import '{folder}' --out RUN_DIR" in done.output


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
        raise EngineError("no more is looked at")

    monkeypatch.setattr("phalanx.serve.gateway.served.opened.gpus", lambda: 2)
    monkeypatch.setattr(service, "read_model_text", lambda *_: None)  # there is no tokenizer
    monkeypatch.setattr(service, "RouterPort", begin)
    words = [str(make_run(tmp_path / "run", DENSE)), "--port", "0", "--numerics", "fast"]
    done = CliRunner().invoke(
        serve_command.command, [*words, "--workers", "prefill:1,decode:1", "--tensor", degrees]
    )
    assert asked == [device, device], done.output
    assert f"computing on {'cpu' if device == 'cpu' else 'cuda:0, cuda:1'}\n" in done.output
