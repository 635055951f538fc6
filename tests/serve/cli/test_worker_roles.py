"""``--workers`` on the command line."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from phalanx_serve.cli.serve_command import command
from phalanx_serve.cli.serve_options import Degrees, RoleDegrees, WorkerRoles


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


@pytest.mark.parametrize(
    ("text", "degrees"),
    [
        ("1", Degrees(1)),
        ("2", Degrees(2)),
        ("prefill:2", Degrees(1, {"prefill": 2})),
        ("prefill:2, decode:1", Degrees(1, {"prefill": 2, "decode": 1})),
    ],
)
def test_processes_are_a_number_or_a_number_for_each_role(text: str, degrees: Degrees) -> None:
    assert RoleDegrees().convert(text, None, None) == degrees


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "two", "prefill", "prefill:", "prefill:0", "think:2", "2,", "decode:1,decode:2"]
)
def test_no_other_number_of_processes_is_taken(text: str) -> None:
    with pytest.raises(click.BadParameter):
        RoleDegrees().convert(text, None, None)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--tensor", "prefill:2"], "--tensor names roles, which are those of --workers"),
        (
            ["--workers", "prefill:1,decode:1", "--pipeline", "both:2"],
            "names the role both, which no worker of --workers has: its roles are prefill, decode",
        ),
        (
            ["--workers", "prefill:1,decode:1", "--pipeline", "decode:2", "--tensor", "2"],
            "give one of them",
        ),
    ],
)
def test_processes_of_roles_that_no_worker_has_are_refused(options: list[str], said: str) -> None:
    told = CliRunner().invoke(command, [".", *options])
    assert told.exit_code == 2
    assert said in " ".join(told.output.split())


def test_what_is_for_workers_alone_is_refused_without_them() -> None:
    for option in (["--threads", "2"], ["--audit", "0.5"], ["--pages", "auto"]):
        assert "--workers" in CliRunner().invoke(command, [".", *option]).output


def test_a_way_of_pages_needs_two_workers_and_one_that_is_known() -> None:
    told = CliRunner().invoke(command, [".", "--workers", "1", "--pages", "nixl"])
    assert (told.exit_code, "it needs --workers 2 or more" in " ".join(told.output.split())) == (2, True)
    assert "'auto', 'socket', 'nixl'" in CliRunner().invoke(command, [".", "--pages", "rdma"]).output
