"""Help of commands: a sentence, the shortest example, details, options by group, further examples.

A docstring is the source: its first sentence, its paragraphs, and its first block after ``\\b``, which holds the examples,
the shortest first. ``Heading`` (``phalanx.command``) begins a group of options.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_UNWRAPPED = "\b\n"
"""Begins a paragraph whose lines click keeps as they are."""
_FIRST_SENTENCE = re.compile(r"(.*?\.)(?=\s+[A-Z(]|\s*$)\s*(.*)", re.DOTALL)
_OPTIONS = "Options"


class HelpText(NamedTuple):
    """Parts of a command's docstring."""

    summary: str
    """The first sentence."""
    examples: tuple[str, ...]
    """One line each, as they are typed; the first has the fewest words."""
    details: tuple[str, ...]
    """The other paragraphs; click keeps the lines of one that begins with ``\\b``."""


def read_help(command: click.Command) -> HelpText:
    """Return the parts of a command's docstring: its first sentence, the example lines after a backspace mark, and other paragraphs."""
    first, *paragraphs = inspect.cleandoc(command.help or "").split("\n\n")
    sentence = _FIRST_SENTENCE.fullmatch(first)
    summary, remainder = sentence.groups() if sentence else (first, "")
    examples = next((text for text in paragraphs if text.startswith(_UNWRAPPED)), "")
    details = (remainder, *(text for text in paragraphs if text != examples))
    return HelpText(
        " ".join(summary.split()),
        tuple(line.strip() for line in examples.removeprefix(_UNWRAPPED).splitlines()),
        tuple(filter(None, details)),
    )


def options_by_heading(command: click.Command, ctx: click.Context) -> dict[str, list[click.Option]]:
    """Return the visible options of each group, in the order of their declaration.

    An option belongs to the last heading before it. Those before any heading, and ``--help``, are the last group.
    """
    groups: dict[str, list[click.Option]] = {}
    heading = _OPTIONS
    for param in command.get_params(ctx):
        if isinstance(param, click.Option) and not param.hidden:
            heading = getattr(param, "heading", _OPTIONS) or heading
            groups.setdefault(heading, []).append(param)
    return groups | {_OPTIONS: groups.pop(_OPTIONS)} if _OPTIONS in groups else groups


class Command(click.Command):
    """A command with the help of this module."""

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """Write the summary, the first example and the details."""
        _write_opening(read_help(self), formatter)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, a section for each group."""
        _write_options(self, ctx, formatter)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """Write the further examples."""
        _write_examples(read_help(self).examples[1:], formatter)


class CommandGroup(click.Group):
    """A group of commands with the help of this module."""

    command_class = Command

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """Write the summary, the first example and the details."""
        _write_opening(read_help(self), formatter)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands, and the options."""
        self.format_commands(ctx, formatter)
        _write_options(self, ctx, formatter)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """Write the further examples."""
        _write_examples(read_help(self).examples[1:], formatter)


class DefaultGroup(CommandGroup):
    """A group that is the command ``unnamed`` if its first word names no command."""

    def __init__(self, *args: Any, unnamed: click.Command, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.unnamed = unnamed

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Return a context of the group if the first word is --help, or is or nearly is one of its commands; else
        of ``unnamed``.

        Without words it is of ``unnamed``, but while a shell completes the first word, of the group.
        """
        own_words = {*self.commands, *(parent.help_option_names if parent else ("--help",))}
        is_own = not own_words.isdisjoint(args[:1]) or any(map(self._is_mistyped, args[:1]))
        if not is_own and (args or not extra.get("resilient_parsing")):
            return self.unnamed.make_context(info_name, args, parent, **extra)
        return super().make_context(info_name, args, parent, **extra)

    def _is_mistyped(self, word: str) -> bool:
        """Return True for a word of letters, not a file's name, that is close to a command's name."""
        if not word.isalpha() or os.path.exists(word):
            return False
        import difflib  # Its import takes longer than that of this module.

        return bool(difflib.get_close_matches(word, self.commands, n=1))

    def invoke(self, ctx: click.Context) -> Any:
        """Call the command of the context."""
        return super().invoke(ctx) if ctx.command is self else ctx.command.invoke(ctx)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the completions of ``incomplete``: commands, values of the first argument of ``unnamed``, and its
        options.
        """
        first = [param for param in self.unnamed.params if isinstance(param, click.Argument)][:1]
        words = [item for param in first for item in param.shell_complete(ctx, incomplete)]
        return [
            *super().shell_complete(ctx, incomplete),
            *words,
            *self.unnamed.shell_complete(ctx, incomplete),
        ]


def _write_opening(text: HelpText, formatter: click.HelpFormatter) -> None:
    """Write the summary, the first example and the details of a help page."""
    examples = [_UNWRAPPED + f"  {example}" for example in text.examples[:1]]
    for paragraph in (text.summary, *examples, *text.details):
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(paragraph)


def _write_options(command: click.Command, ctx: click.Context, formatter: click.HelpFormatter) -> None:
    """Write the command's visible options, a section for each group."""
    for heading, options in options_by_heading(command, ctx).items():
        with formatter.section(heading):
            formatter.write_dl([record for option in options if (record := option.get_help_record(ctx))])


def _write_examples(examples: Iterable[str], formatter: click.HelpFormatter) -> None:
    """Write a section of example lines, unwrapped; nothing if there are none."""
    lines = [*examples]
    if lines:
        with formatter.section("Examples"):
            formatter.write_text(_UNWRAPPED + "\n".join(f"  {line}" for line in lines))
