"""``phalanx checkpoint`` on object stores."""

from __future__ import annotations

import json
import re
import secrets
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from checkpoint.worlds import save_state
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.cli.weights import checkpoint_command as command
from store.scripted_server import scripted
from store.servers import CREDENTIALS, Server


def call(*arguments: object) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def saved(root: Path, *steps: int) -> DiskTier:
    tier = DiskTier(root)
    for step in steps:
        save_state(tier, step, {"model/w": torch.full((5,), float(step))})
    return tier


@pytest.fixture(params=["s3", "file", "path"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param != "s3":
        (tmp_path / "store" / "committed").mkdir(parents=True)
        return f"{'file://' if request.param == 'file' else ''}{tmp_path / 'store'}"
    server: Server = request.getfixturevalue("s3_server")
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return server.url(secrets.token_hex(8))


def test_a_checkpoint_goes_to_a_store_is_listed_verified_and_comes_back(url: str, tmp_path: Path) -> None:
    disk = saved(tmp_path / "run", 3, 8)
    first = call("copy", disk.root, url, "--step", 3)
    assert (first.exit_code, first.output) == (0, f"step 3: copied, {first.output.split(', ')[1]}"), (
        first.output
    )
    assert call("copy", disk.root, url).exit_code == 0
    again = json.loads(call("copy", disk.root, url, "--json").output)
    assert again == {"step": 8, "copied": False, "bytes": 0, "target": url}
    rows = json.loads(call("list", url, "--json").output)["checkpoints"]
    assert [(row["step"], row["ranks"], row["problem"]) for row in rows] == [(3, 1, None), (8, 1, None)]
    assert rows[0]["bytes"] > 20
    assert rows[0]["path"] == f"{url}/committed/00000003.json"
    assert json.loads(call("verify", url, "--json").output) == {"good": True, "findings": []}
    assert call("copy", url, tmp_path / "back", "--step", 3).exit_code == 0
    assert DiskTier(tmp_path / "back").steps() == [3]
    assert call("verify", tmp_path / "back").exit_code == 0


def test_a_step_that_is_not_there_is_named_with_those_that_are(url: str, tmp_path: Path) -> None:
    call("copy", saved(tmp_path / "run", 3).root, url)
    done = call("copy", url, tmp_path / "back", "--step", 4)
    assert (done.exit_code, "no step 4" in done.output, f"{url}; there are [3]" in done.output) == (
        1,
        True,
        True,
    )
    assert call("verify", url, "--step", 4).exit_code == 1


def test_a_list_without_checkpoints_is_a_note_on_standard_error_and_a_verification_shows_its_progress_there(
    tmp_path: Path,
) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    empty = call("list", tmp_path / "run")
    assert (empty.exit_code, empty.stdout) == (0, "")
    assert empty.stderr == f"there is no committed checkpoint in {tmp_path / 'run' / 'checkpoints'}\n"
    saved(tmp_path / "run" / "checkpoints", 3)
    verified = call("verify", tmp_path / "run")
    assert verified.stdout == "every byte is as it was written\n"
    assert re.match(r"read: (.*) of \1, ", verified.stderr)
    assert call("verify", tmp_path / "run", "--json").stderr == ""


def test_nothing_is_copied_to_a_store_that_ignores_conditions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with scripted() as server:
        for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.port}"}.items():
            monkeypatch.setenv(name, value)
        done = call("copy", saved(tmp_path / "run", 3).root, "s3://bucket/p")
        assert done.exit_code == 1
        assert "ignores If-None-Match" in done.output
        assert all("/probe/" in key for key in server.objects)


def test_a_url_with_a_secret_is_refused_without_repeating_it() -> None:
    done = call("list", "s3://key:secret@bucket/p")
    assert (done.exit_code, "secret" in done.output) == (1, False)
