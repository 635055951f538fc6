"""Numbers as tables show them, and as options take them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from phalanx.cli.main import phalanx_command
from phalanx.cli.output import share, utilization


def test_a_utilization_above_the_measured_peak_is_marked() -> None:
    assert [utilization(0.412), utilization(1.0), utilization(1.18)] == ["41.2%", "100.0%", "118.0%!"]
    assert share(1.18) == "118.0%"


def _floats(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.ParamType]]:
    """The types of all parameters that are floats, by command and parameter."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from _floats(command, (*path, name))
        for param in command.params:
            if isinstance(param.type, click.types.FloatParamType):
                yield " ".join((*path, name, *param.opts)), param.type


def _takes(kind: click.ParamType, text: str) -> bool:
    try:
        kind.convert(text, None, None)
    except click.BadParameter:
        return False
    return True


@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
def test_no_option_takes_a_number_that_is_not_finite(number: str) -> None:
    options = dict(_floats(phalanx_command))
    assert "health --least-tflops" in options
    assert [option for option, kind in options.items() if _takes(kind, number)] == []


@pytest.mark.parametrize("option", ["--least-tflops", "--least-disk-mbps"])
def test_a_threshold_below_zero_is_refused(option: str) -> None:
    refused = CliRunner().invoke(phalanx_command, ["health", option, "-1"])
    assert refused.exit_code == 2
    assert f"Invalid value for '{option}': -1.0 is not in the range x>=0" in refused.output


@pytest.mark.parametrize("times", ["0\nnan\n1", "0\n1\ninf", "-1\n2"])
def test_a_trace_of_arrivals_has_finite_seconds_alone(times: str, tmp_path: Path) -> None:
    (tmp_path / "trace").write_text(times)
    refused = CliRunner().invoke(
        phalanx_command, ["simulate", "traffic", "--seeds", "0:1", "--trace", str(tmp_path / "trace")]
    )
    assert refused.exit_code != 0
    assert "trace" in refused.output


@pytest.mark.parametrize("seeds", ["²:³", "0:" + "9" * 5000, "5:5", "7"])
@pytest.mark.parametrize("words", [["fleet", "--small"], ["traffic"]])
def test_seeds_that_are_no_range_are_refused(words: list[str], seeds: str) -> None:
    refused = CliRunner().invoke(phalanx_command, ["simulate", *words, "--seeds", seeds])
    assert refused.exit_code == 2
    assert "is not FIRST:END" in refused.output
