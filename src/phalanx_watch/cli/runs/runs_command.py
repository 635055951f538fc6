"""``phalanx runs``: the runs in a folder: list, show, compare, label and remove them."""

from __future__ import annotations

import click

from phalanx_watch.cli.runs.compare import compare_command
from phalanx_watch.cli.runs.labels import note_command, remove_command, tag_command
from phalanx_watch.cli.runs.listing import list_command
from phalanx_watch.cli.runs.show import show_command


class _ListsByDefault(click.Group):
    """A group whose command ``list`` may be left out: ``phalanx runs FOLDER``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Puts the word in where it is missing."""
        if not args or not (args[0] in self.commands or args[0] in ctx.help_option_names):
            args = ["list", *args]
        return super().parse_args(ctx, args)


@click.group("runs", cls=_ListsByDefault)
def command() -> None:
    """The runs in a folder: list, show, compare, label and remove them.

    Without a further word: phalanx runs list.

    \b
      phalanx runs
      phalanx runs list /data/runs --where "loss<2" --tag good --sort -bits_per_byte
      phalanx runs show runs/quickstart-1f3a9c04
      phalanx runs compare runs/a runs/b runs/c
      phalanx runs tag runs/a good baseline
      phalanx runs note runs/a "the one for the paper"
      phalanx runs rm runs/b
    """


for _one in (list_command, show_command, compare_command, tag_command, note_command, remove_command):
    command.add_command(_one)
