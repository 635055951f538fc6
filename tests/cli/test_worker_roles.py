"""``--workers`` on the command line."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from phalanx.cli.weights.serve_command import command
from phalanx.cli.weights.service.worker_roles import WorkerRoles


@pytest.mark.parametrize(
    ("text", "roles"),
    [
        ("1", ("both",)),
        ("2", ("both", "both")),
        ("prefill:1,decode:2", ("prefill", "decode", "decode")),
        ("both:1, decode:1", ("both", "decode")),
    ],
)
def test_workers_are_a_number_or_a_number_of_each_role(text: str, roles: tuple[str, ...]) -> None:
    assert WorkerRoles().convert(text, None, None) == roles


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "two", "prefill", "prefill:", "prefill:0", "think:1", "1,", "300"]
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        WorkerRoles().convert(text, None, None)


def test_what_is_for_workers_alone_is_refused_without_them() -> None:
    for option in (["--threads", "2"], ["--audit", "0.5"]):
        assert "--workers" in CliRunner().invoke(command, [".", *option]).output
