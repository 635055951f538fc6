"""--host and --coordinator of every command that has them."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from phalanx.cli.main import phalanx_command

LISTENS = ["serve", "ui"]
FOR_OTHERS = ["agent", "pod", "fleet serve"]


def _commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from _commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


def _refusal(command: str, *options: str) -> str:
    result = CliRunner().invoke(phalanx_command, [*command.split(), *options])
    assert result.exit_code == 2
    return result.output


def test_these_are_all_commands_with_a_host() -> None:
    having = [
        name
        for name, command in _commands(phalanx_command)
        if any("--host" in param.opts for param in command.params)
    ]
    assert sorted(having) == sorted(LISTENS + FOR_OTHERS)


@pytest.mark.parametrize("command", LISTENS + FOR_OTHERS)
def test_a_host_with_a_port_is_refused_with_the_form_to_write(command: str) -> None:
    assert "'--host': '127.0.0.1:80' is no host: write a name or an IP address, without a port" in _refusal(
        command, "--host", "127.0.0.1:80"
    )


@pytest.mark.parametrize("command", LISTENS)
def test_a_name_without_an_address_is_no_place_to_listen_at(command: str) -> None:
    assert "no address is known for no-such-host.invalid" in _refusal(
        command, "--host", "no-such-host.invalid"
    )


@pytest.mark.parametrize("command", FOR_OTHERS)
def test_others_cannot_connect_to_every_interface(command: str) -> None:
    assert "'--host': 0.0.0.0 means every interface" in _refusal(command, "--host", "0.0.0.0")


@pytest.mark.parametrize("command", ["agent", "pod"])
@pytest.mark.parametrize("address", ["head", ":29400", "head:99999"])
def test_a_coordinator_has_a_host_and_a_port(command: str, address: str) -> None:
    assert f"'--coordinator': '{address}' is not HOST:PORT" in _refusal(command, "--coordinator", address)


@pytest.mark.parametrize("host", ["[::1]", "127.0.0.1"])
def test_a_loopback_address_asks_for_no_key_however_it_is_written(host: str) -> None:
    result = CliRunner().invoke(phalanx_command, ["serve", "no-such-run", "--host", host])
    assert result.exit_code == 1
    assert "no folder no-such-run" in result.output
