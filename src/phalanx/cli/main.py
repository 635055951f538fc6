"""``phalanx``: the commands, loaded only when they are called.

``phalanx --help`` must answer at once, so nothing heavier than click is imported here. The module of a command is imported when the
command is used.
"""

from __future__ import annotations

import errno
import importlib
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from io import TextIOWrapper

import click

from phalanx.cli.output import safe_output
from phalanx.command_help import CommandGroup
from phalanx.plugins import PluginError, load_plugin
from phalanx.version import __version__

TASKS = {
    # Other projects add commands by entry points of the group "phalanx.commands".
    "Train": {
        "new": ("phalanx.cli.train.run_file:new_command", "Write a first run file, each field explained."),
        "train": ("phalanx.cli.train", "Train a run on this machine, or as a rank of torchrun or srun."),
        "spec": (
            "phalanx.cli.train.run_file:spec_command",
            "Every field of a run file, with its default and meaning.",
        ),
        "show": ("phalanx.cli.train", "Parameters, FLOPs per token and state bytes of a run's model."),
    },
    "Data": {
        "data": (
            "phalanx.cli.data",
            "Prepare and check token shards; show which of them a run reads, and when.",
        ),
    },
    "Weights": {
        "checkpoint": ("phalanx.cli.weights:checkpoint_command", "List, verify and export checkpoints."),
        "hash": ("phalanx.cli.weights:hash_command", "SHA-256 of all weights of a run or checkpoint."),
        "export": ("phalanx.cli.weights:export_command", "Write a run's weights for other software."),
        "import": ("phalanx.cli.weights:import_command", "Read a Hugging Face model into a run directory."),
        "pack": (
            "phalanx_serve.cli",
            "A run's weights as one file, in the order in which serving reads them.",
        ),
    },
    "Watch": {
        "status": ("phalanx.cli.fleet", "A run's progress, and its fleet's members, spares and incidents."),
        "watch": ("phalanx_watch.cli.run_views:watch_command", "Watch a run while it trains, or afterwards."),
        "ui": (
            "phalanx_watch.cli.run_views:ui_command",
            "A page over all runs: curves, comparisons, where the time went.",
        ),
        "why": ("phalanx_watch.cli", "Problems of a run: cause, start and remedy."),
        "spike": (
            "phalanx_watch.cli",
            "The cause of a loss spike: batch, rate, format or layer, by an exact replay.",
        ),
        "logs": (
            "phalanx.cli.launch",
            "Logs of a run's processes: merged, filtered, grouped, followed.",
        ),
        "ranks": (
            "phalanx_watch.cli.run_views:ranks_command",
            "The ranks side by side: which are slower than their peers, and where they sit.",
        ),
        "profile": (
            "phalanx_watch.cli",
            "Where the time of a running run's next steps goes, across its ranks.",
        ),
        "goodput": ("phalanx_watch.cli.run_views:goodput_command", "Where every second of a run went."),
        "runs": ("phalanx_watch.cli", "The runs in a folder: list, show, compare, tag and remove them."),
        "diff": (
            "phalanx_watch.cli.reproduction:diff_command",
            "Where two runs part: field, step, tensor, and by a replay the module and rank.",
        ),
        "reproduce": (
            "phalanx_watch.cli.reproduction:reproduce_command",
            "Repeat a run, or show the differences between then and now.",
        ),
        "sinks": (
            "phalanx_watch.cli.run_views:sinks_command",
            "Send a run's trackers the events that they missed.",
        ),
    },
    "Fleet": {
        "submit": ("phalanx.cli.launch.submit:submit_command", "Start a run on a cluster."),
        "cancel": ("phalanx.cli.launch.submit:cancel_command", "End a submitted run, saved."),
        "fleet": ("phalanx.cli.fleet", "Requests to a running fleet: drain, add, stop."),
        "agent": ("phalanx.cli.fleet.agent:agent_command", "Take part in a run with this node of a cluster."),
        "pod": ("phalanx.cli.fleet.agent:pod_command", "Take part in a run as a pod of a Kubernetes job."),
        "health": ("phalanx.cli.fleet", "Check that this machine is fit to train."),
        "place": (
            "phalanx_plan.cli",
            "Best places of a run's nodes in a network, and their cost per step.",
        ),
    },
    "Plan": {
        "plan": ("phalanx_plan.cli", "The best layouts of a run on a cluster: memory, time, cost, and why."),
        "models": ("phalanx_plan.cli.catalogs:models_command", "Model shapes by name."),
        "hardware": (
            "phalanx_plan.cli.catalogs:hardware_command",
            "Accelerators and systems for plans, with sources.",
        ),
        "calibrate": ("phalanx_plan.cli", "Measure this machine, for plans on it."),
        "simulate": ("phalanx_plan.cli", "A fleet under failures, by the code that keeps a real one alive."),
    },
    "Serve": {
        "generate": ("phalanx_serve.cli", "Text from a checkpoint."),
        "serve": ("phalanx_serve.cli", "A run's model behind OpenAI's HTTP interface."),
        "eval": (
            "phalanx_serve.cli.scoring:eval_command",
            "Figures of a run's weights on tasks with known answers.",
        ),
        "score": (
            "phalanx_serve.cli.scoring:score_command",
            "Log-probabilities of given text, by the trainer's arithmetic.",
        ),
    },
}
"""The commands by task, as ``phalanx --help`` lists them, each with its help.

``PACKAGE`` stands for ``PACKAGE.NAME_command:command``; modules of several commands name the function.
"""
_COMMANDS = {name: entry for commands in TASKS.values() for name, entry in commands.items()}
_LIBRARIES = ("starlette", "uvicorn", "prometheus_client")
"""Libraries that packages beside the core need and the core does not."""


class _Lazy(CommandGroup):
    """A group whose commands are imported on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command. Other names are looked up among plugins, ``None`` if none has it.

        While completing words, a command whose package is not installed is None too; else ``ModuleNotFoundError``
        is raised.
        """
        if cmd_name not in _COMMANDS:
            other: click.Command | None = load_plugin("phalanx.commands", cmd_name)
            return other
        try:
            return load_command(cmd_name)
        except ModuleNotFoundError:
            if ctx.resilient_parsing:  # Completing words: commands that are not installed are left out.
                return None
            raise

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve a command. Raises ``click.UsageError`` for an unknown name; the message has the nearest one, if
        any is near.
        """
        if not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            import difflib  # Its import takes longer than that of any module here.

            if near := difflib.get_close_matches(args[0], _COMMANDS, n=1):
                raise click.UsageError(f"no such command {args[0]!r}; did you mean {near[0]}?", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        width = max(map(len, _COMMANDS))
        for task, commands in TASKS.items():
            with formatter.section(task):
                formatter.write_dl([(f"{name:<{width}}", text) for name, (_, text) in commands.items()])


def load_command(name: str) -> click.Command:
    """Import and return a command of this project. Raises ``KeyError`` for another name."""
    package, _, function = _COMMANDS[name][0].partition(":")
    module = importlib.import_module(package if function else f"{package}.{name}_command")
    command: click.Command = getattr(module, function or "command")
    return command


@click.command(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="phalanx")
def phalanx_command() -> None:
    """Phalanx trains very large transformers as one logical job on any fleet.

    The bits belong to the run, not to the fleet: the weights at the end have the same hash on any number of ranks, and
    across any interruption.

    \b
      phalanx train configs/quickstart.toml
      phalanx train configs/quickstart.toml --ranks 3 --set optimizer.lr=3e-4
      phalanx show configs/llama3-405b.toml

    configs/ is found in any folder: those run files are part of the installation. Words are completed in the shell after
    one of these:

    \b
      eval "$(_PHALANX_COMPLETE=bash_source phalanx)"                  # bash: in ~/.bashrc
      eval "$(_PHALANX_COMPLETE=zsh_source phalanx)"                   # zsh: in ~/.zshrc
      _PHALANX_COMPLETE=fish_source phalanx | source                   # fish: in config.fish
    """


def main() -> None:
    """Run the command line of this process, and exit with its code.

    SIGTERM ends a command as an exception does, so that incomplete files are removed, unless it is ignored. Opens
    missing standard streams, and records the command in ``PHALANX_COMMAND`` for the ranks.
    """
    _open_missing_streams()
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
        signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # Standard output may be a file that is open for reading and writing.
            if isinstance(stream, TextIOWrapper):  # A file's name may not be UTF-8.
                stream.reconfigure(errors="backslashreplace")
    os.environ["PHALANX_COMMAND"] = shlex.join(
        ["phalanx", *sys.argv[1:]]
    )  # For the record of a run: ranks are started by other command lines.
    sys.exit(exit_code(sys.argv[1:]))


def _open_missing_streams() -> None:
    """Open /dev/null in place of each standard stream that is closed (``>&-``).

    Python then has ``None`` for the stream. The next file that is opened would get its descriptor, and the output of libraries.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            fd = os.open(os.devnull, os.O_RDWR)
            # Processes that a command starts have the streams too.
            os.set_inheritable(fd, True)
            setattr(sys, name, open(fd, mode, closefd=False))  # noqa: SIM115 - open until the process ends


def exit_code(words: Sequence[str]) -> int:
    """Run ``phalanx`` with these words, with safe output, and return its exit code.

    Errors that a user can act on are printed without a traceback. Raises ``SystemExit`` as commands do, and any
    other exception of a defect.
    """
    with safe_output():
        return _exit_code(words)


def _exit_code(words: Sequence[str]) -> int:
    """Run the command of ``words`` and return its exit code. Known errors, missing packages and failed output
    become messages.

    An interruption returns 130, and a closed pipe 0. Other errors are raised.
    """
    try:
        phalanx_command(list(words), standalone_mode=False)
        return 0
    except click.exceptions.Exit as ending:
        return ending.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return 130
    except PluginError as error:
        click.echo(f"Error: {error}", err=True)
        return 1
    except RuntimeError as error:
        # Before Python 3.12, what a signal raises while a class with descriptors is made, as in an import, is only the cause.
        if isinstance(error.__cause__, KeyboardInterrupt):
            return 130
        if isinstance(error.__cause__, SystemExit):
            raise error.__cause__ from None
        raise
    except ModuleNotFoundError as error:
        remedy = _remedy(words, (error.name or "").partition(".")[0])
        if not remedy:
            raise
        click.echo(f"Error: {error.name} is not installed: pip install {remedy}", err=True)
        return 1
    except BrokenPipeError:
        return 0
    except OSError as error:
        if error.filename is None:
            # Unbuffered output keeps no data to write again, so only the error shows the failure.
            if not _output_fails() and error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            with suppress(OSError):
                click.echo(f"Error: cannot write the output: {error.strerror}", err=True)
            return 1
        # A name that is too long, a link to itself, a file of another user, a full disk: the system's message
        # is good enough.
        click.echo(f"Error: {error.filename}: {error.strerror}", err=True)
        return 1


def _remedy(words: Sequence[str], missing: str) -> str:
    """Return the pip command that installs a missing module of a command beside the core; empty if none does."""
    package, _ = _COMMANDS.get(next(iter(words), ""), ("", ""))
    own = package.partition(".")[0]
    if missing in _LIBRARIES:
        return f"'phalanx-train[{own.removeprefix('phalanx_')}]'"
    return "--force-reinstall --no-deps phalanx-train" if missing == own != "phalanx" else ""


def _output_fails() -> bool:
    """Return True if standard output accepts no more data, as on a full disk, and redirect it to /dev/null then."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        # The interpreter would try again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False
