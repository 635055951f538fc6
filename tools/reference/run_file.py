"""``docs/reference/run-file.md``: what ``phalanx spec --markdown`` prints, under an introduction."""

from __future__ import annotations

from click.testing import CliRunner

from phalanx.cli.train.run_file import spec_command as command

_INTRODUCTION = """\
# The run file

Every field of a run file (TOML), made by `phalanx spec --markdown` from the code that reads it. Fields of the *run* fix the
bits of the weights. Fields of the *fleet* may change at any start ([../design/reproducibility.md](../design/reproducibility.md)). Fields of the *layout* reach the
bits too, but a run can resume under others when its directory is named ([../train/parallelism.md](../train/parallelism.md)).

"""


def page() -> str:
    """Return the page."""
    return _INTRODUCTION + CliRunner().invoke(command, ["--markdown"]).stdout
