"""One number format has two names, PyTorch's and the run file's, and every command that takes one takes both."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from phalanx.cli.weights import export_command
from phalanx_serve.cli import generate_command, serve_command
from phalanx_serve.cli.scoring import score_command

COMMANDS = {
    "serve": serve_command.command,
    "generate": generate_command.command,
    "score": score_command,
    "export": export_command,
}


@pytest.mark.parametrize("name", COMMANDS)
def test_both_names_of_a_format_mean_the_same_and_help_shows_one(name: str) -> None:
    command = COMMANDS[name]
    option = next(one for one in command.params if one.name == "dtype")
    context = click.Context(command)
    for given, meant in (
        ("fp32", "float32"),
        ("bf16", "bfloat16"),
        ("float32", "float32"),
        ("bfloat16", "bfloat16"),
    ):
        assert option.type_cast_value(context, given) == meant
    with pytest.raises(click.BadParameter, match="'fp16' is not one of 'float32', 'bfloat16'"):
        option.type_cast_value(context, "fp16")
    assert "--dtype [float32|bfloat16]" in CliRunner().invoke(command, ["--help"], terminal_width=200).output
