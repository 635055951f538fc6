"""``python -m validation``."""

from validation.command import command

command(prog_name="python -m validation")
