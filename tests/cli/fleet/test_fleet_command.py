"""``phalanx fleet``: what is refused before it is sent."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from phalanx.cli.fleet.fleet_command import command


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["drain", "node 1"], "node"),
        (["drain", ""], "node"),
        (["add", "rack/node-1"], "node"),
        (["shrink", "--by", "9999999"], "by"),
        (["grow", "--by", "9999999"], "by"),
    ],
)
def test_a_request_that_no_coordinator_reads_is_refused_with_its_field(
    words: list[str], field: str, tmp_path: Path
) -> None:
    refused = CliRunner().invoke(command, [words[0], str(tmp_path), *words[1:]])
    assert refused.exit_code == 2
    assert f"$.{field}" in refused.output
