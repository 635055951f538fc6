"""A dataclass describes a command: its arguments, its options, and their help."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import click
import pytest
from click.testing import CliRunner, Result

from phalanx.command import (
    Argument,
    AsJson,
    ExistingFile,
    Option,
    Overrides,
    Sets,
    command_options,
    given_options,
    set_fields,
    written_options,
)
from phalanx.run.fields import POSITIVE, ValueRange


@dataclass(frozen=True, kw_only=True)
class Network:
    host: str = "localhost"
    """Address to listen at."""
    port: Annotated[int, ValueRange(at_least=0, at_most=65535)] = 8000


@dataclass(frozen=True, kw_only=True)
class Options:
    places: Annotated[tuple[Path, ...], Argument(metavar="[PLACE...]")] = ()
    target: str
    """Where to write, in one
    place."""
    rate: Annotated[float | None, ValueRange(above=0, below=0.5)] = None
    order: Literal["data", "pipeline"] = "data"
    nodes: Annotated[tuple[Annotated[int, POSITIVE], ...], Option("--node", "-n")] = ()
    template: ExistingFile | None = None
    lead: Annotated[bool | None, Option("--lead/--no-lead")] = None
    network: Network
    overrides: Overrides = ()
    quiet: Annotated[bool, Option(text=f"Print {0} lines.", hidden=False)] = False
    seed: Annotated[int, Option(show_default=True)] = 0
    silent_default: Annotated[str, Option(show_default=False)] = "auto"
    as_json: AsJson = False


received: list[Options] = []


@click.command("example")
@command_options(Options)
def command(options: Options) -> None:
    """Receive the options."""
    received.append(options)


def call(*words: str) -> Result:
    received.clear()
    return CliRunner().invoke(command, words)


def test_a_command_gets_one_value_of_its_dataclass_with_all_defaults() -> None:
    assert call("--target", "x").exit_code == 0
    assert received == [Options(target="x", network=Network())]


def test_every_kind_of_field_is_read_from_the_command_line(tmp_path: Path) -> None:
    template = tmp_path / "template"
    template.touch()
    words = "a b --target x --rate 0.25 --order pipeline -n 1 --node 2 --no-lead --host h --port 0 --set f=1 --quiet --seed 3"
    result = call(*words.split(), "--template", str(template), "--silent-default", "y", "--json")
    assert (result.exit_code, result.output) == (0, "")
    assert received == [
        Options(
            places=(Path("a"), Path("b")),
            target="x",
            rate=0.25,
            order="pipeline",
            nodes=(1, 2),
            template=template,
            lead=False,
            network=Network(host="h", port=0),
            overrides=("f=1",),
            quiet=True,
            seed=3,
            silent_default="y",
            as_json=True,
        )
    ]


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--target", "x", "--rate", "0.5"],
        ["--target", "x", "--order", "other"],
        ["--target", "x", "-n", "0"],
        ["--target", "x", "--template", "/no/such/file"],
        ["--target", "x", "--port", "65536"],
    ],
)
def test_a_missing_or_illegal_value_is_refused_by_the_option_s_name(words: list[str]) -> None:
    result = call(*words)
    assert (result.exit_code, received) == (2, [])
    assert (words[-2].replace("-n", "--node") if words else "--target") in result.output


def test_help_has_the_strings_under_the_fields_and_the_defaults_that_are_not_empty() -> None:
    lines = [" ".join(line.split()) for line in call("--help").output.splitlines()]
    assert "Usage: example [OPTIONS] [PLACE...]" in lines
    assert "--target TEXT Where to write, in one place. [required]" in lines
    assert "--host TEXT Address to listen at. [default: localhost]" in lines
    assert "--set FIELD=VALUE" in lines
    assert "--quiet Print 0 lines." in lines
    assert "--seed INTEGER [default: 0]" in lines
    assert "--silent-default TEXT" in lines
    assert "--json Print one JSON object." in lines


@dataclass(frozen=True, kw_only=True)
class SubmitOptions:
    folders: Annotated[tuple[Path, ...], Argument()] = ()
    nodes: Annotated[int | None, Sets("fleet.nodes")] = None
    spares: Annotated[int | None, Option("--more"), Sets("fleet.spares")] = None
    hosts: Annotated[Path | None, Sets("launch.hosts")] = None
    shares: Annotated[tuple[str, ...], Sets("launch.shares")] = ()
    job: Annotated[bool | None, Option("--job/--lines")] = None
    name: str = ""
    is_quiet: bool = False


def test_options_that_set_fields_of_the_run_file_are_written_as_overrides() -> None:
    assert set_fields(SubmitOptions()) == []
    options = SubmitOptions(nodes=2, spares=0, hosts=Path("hosts.txt"), shares=("pod=0.5",))
    assert set_fields(options) == [
        "fleet.nodes=2",
        "fleet.spares=0",
        'launch.hosts="hosts.txt"',
        'launch.shares=["pod=0.5"]',
    ]


def test_options_with_a_value_are_named_as_the_user_writes_them() -> None:
    fields = ("folders", "nodes", "spares", "shares", "job", "name", "is_quiet")
    assert written_options(SubmitOptions(), *fields) == []
    options = SubmitOptions(folders=(Path("a"),), spares=0, job=False, name="x", is_quiet=True)
    assert written_options(options, *fields) == ["FOLDERS", "--more", "--lines", "--name", "--is-quiet"]


def test_options_on_the_command_line_are_told_from_defaults_of_the_same_value() -> None:
    @click.command("submit")
    @command_options(SubmitOptions)
    def submit(_options: SubmitOptions) -> None:
        click.echo(json.dumps(given_options()))

    result = CliRunner().invoke(submit, ["folder", "--name", "", "--more", "1", "--lines"])
    assert json.loads(result.output) == {
        "folders": "FOLDERS",
        "spares": "--more",
        "job": "--job",
        "name": "--name",
    }


@dataclass(frozen=True, kw_only=True)
class Placed:
    run_dir: Annotated[Path | None, Sets("run_dir")] = None
    """The folder of a run."""


def test_a_name_of_any_characters_is_set_as_it_is_written() -> None:
    words = set_fields(Placed(run_dir=Path('/tmp/r😀 "quoted" \\ tab\t')))
    (word,) = words
    assert tomllib.loads(word) == {"run_dir": '/tmp/r😀 "quoted" \\ tab\t'}
