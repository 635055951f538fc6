"""``phalanx data``: token shards made from text, and checked."""

from __future__ import annotations

import click

from phalanx.cli.data.copies import copy_command, verify_command
from phalanx.cli.data.order import mixture_command, order_command, where_command
from phalanx.cli.data.origin import show_command, trace_command
from phalanx.cli.data.prepare import prepare_command
from phalanx.cli.data.recipe import plan_command, work_command


@click.group("data")
def command() -> None:
    """Prepare and check token shards, and see what a run reads of them and when.

    \b
      phalanx data prepare texts/*.txt --out data/mine --tokenizer bytes
      phalanx data show data/mine
      phalanx data verify data/mine
      phalanx data show runs/quickstart-1f3a9c04 --step 12    # what a run was trained on in a step
    """


command.add_command(copy_command)
command.add_command(verify_command)
command.add_command(prepare_command)
command.add_command(mixture_command)
command.add_command(order_command)
command.add_command(where_command)
command.add_command(plan_command)
command.add_command(work_command)
command.add_command(show_command)
command.add_command(trace_command)
