"""A command's arguments and options, declared as the fields of a frozen dataclass.

The grammar is that of the run file (``phalanx.run.fields``): the type of a field and its ``ValueRange`` state the legal
values, and the string under the field is its help::

    @dataclass(frozen=True, kw_only=True)
    class ScoreOptions:
        place: Annotated[Path, Argument()]
        step: int | None = None
        \"\"\"A step other than the newest.\"\"\"

    @click.command("score")
    @command_options(ScoreOptions)
    def command(options: ScoreOptions) -> None: ...

Each field is an option with the field's name, unless it is marked ``Argument``. ``bool`` is a flag, ``Literal`` a choice, and
``tuple[X, ...]`` may be repeated. A field without a default is required. An ``Annotated`` may hold a ``click.ParamType``, which
converts the text. A field whose type is such a dataclass itself stands for all the fields of that one, in its place.
``Heading`` begins a group of options in the help.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import click
from click.core import ParameterSource

from phalanx.plugins import PluginError, load_plugin, plugin_names
from phalanx.run.fields import ValueRange, field_docs

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_Options = TypeVar("_Options")

FilePath = Annotated[Path, click.Path(dir_okay=False, path_type=Path)]
"""A file to write."""
ExistingFile = Annotated[Path, click.Path(exists=True, dir_okay=False, path_type=Path)]
"""A file to read."""
ExistingFolder = Annotated[Path, click.Path(exists=True, file_okay=False, path_type=Path)]
"""A folder to read."""


@dataclass(frozen=True)
class Argument:
    """Marks a field that is given by its position on the command line."""

    metavar: str | None = None


@dataclass(frozen=True)
class Heading:
    """Begins a group of options in the help: the field, and those that follow up to the next heading."""

    title: str


class Option:
    """Spelling and presentation of an option, where these do not follow from its field."""

    def __init__(
        self,
        *names: str,
        metavar: str | None = None,
        show_default: bool | None = None,
        text: str | None = None,
        **click_attributes: Any,
    ) -> None:
        """Describe an option of a field. ``text`` is the help of a field that has no string of its own; without
        ``show_default``, a default that is not empty or zero is shown. Other arguments are click's.
        """
        self.names = names
        self.metavar = metavar
        self.show_default = show_default
        self.text = text
        self.click_attributes = click_attributes


@dataclass(frozen=True)
class Sets:
    """Marks an option that is short for ``--set FIELD=VALUE``."""

    field: str


class PluginName(click.ParamType[str]):
    """A name in a group of plug-ins (``phalanx.plugins``); the group is read only when the option is used or its help is shown.

    With ``declaration``, only those plug-ins are offered whose attribute of that name is not false.
    """

    name = "choice"

    def __init__(self, group: str, declaration: str = "") -> None:
        self.group = group
        self.declaration = declaration

    @property
    def choices(self) -> list[str]:
        """The names."""
        return [name for name in plugin_names(self.group) if not self.declaration or self._declares(name)]

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str | None:
        """Return the names, as of a choice."""
        return self._names().get_metavar(param, ctx)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return a name of the group. Raises ``click.BadParameter`` with all names for another one."""
        return self._names().convert(value, param, ctx)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the names that begin with ``incomplete``."""
        return self._names().shell_complete(ctx, param, incomplete)

    def _names(self) -> click.Choice[str]:
        return click.Choice(self.choices)

    def _declares(self, name: str) -> bool:
        try:
            return bool(getattr(load_plugin(self.group, name), self.declaration, True))
        except PluginError:
            return True  # its use names the broken package


class FiniteRange(click.FloatRange):
    """A finite number in a range: the range alone has neither an end nor an order for infinity and NaN."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number. Raises ``click.BadParameter``."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is no finite number.", param, ctx)
        return number


AsJson = Annotated[bool, Option("--json", text="Print one JSON object."), Heading("Options")]
"""The flag ``--json``."""
Overrides = Annotated[tuple[str, ...], Option("--set", metavar="FIELD=VALUE")]
"""Fields of the run file with other values, as ``--set`` gives them."""


def command_options(section: type[_Options]) -> Callable[[Callable[[_Options], None]], Callable[..., None]]:
    """Return a decorator that adds the options of the dataclass ``section`` to a command, whose function gets one
    value of it.
    """

    def decorate(function: Callable[[_Options], None]) -> Callable[..., None]:
        """Return ``function`` as a click callback: the options of ``section`` are added to it, and it is called with
        a section built from their values.
        """

        @functools.wraps(function)
        def call(**values: object) -> None:
            function(_build(section, values))

        for add_parameter in reversed([*_parameters(section)]):
            add_parameter(call)
        return call

    return decorate


def set_fields(options: Any) -> list[str]:
    """Return ``FIELD=VALUE``, in the form of ``--set``, for each option that is marked ``Sets`` and has a value."""
    return [
        f"{note.field}={json.dumps(value, default=str, ensure_ascii=False)}"
        for name, hint in _hints(options.__class__).items()
        for note in _take_apart(hint)[2]
        if isinstance(note, Sets) and (value := getattr(options, name)) not in (None, ())
    ]


def written_options(options: Any, *fields: str) -> list[str]:
    """Return the names of the options of ``fields`` that have a value.

    False, empty and None count as none, except False of an option with a name for it.
    """
    written = []
    for field in fields:
        value = getattr(options, field)
        names = _names(field, _take_apart(_hints(options.__class__)[field])[2])[0].split("/")
        if value is False and len(names) > 1:
            written.append(names[1])
        elif not (value is None or value is False or value in ((), "")):
            written.append(names[0])
    return written


def given_options() -> dict[str, str]:
    """Return the fields on the command line that is being run, each with its option's first name or its argument's metavar."""
    context = click.get_current_context()
    return {
        param.name: param.opts[0] if isinstance(param, click.Option) else param.human_readable_name
        for param in context.command.params
        if param.name and context.get_parameter_source(param.name) is ParameterSource.COMMANDLINE
    }


@functools.cache
def _hints(section: Any) -> Mapping[str, Any]:
    return get_type_hints(section, include_extras=True)


def _build(section: Any, values: Mapping[str, object]) -> Any:
    inner = {name: _nested(hint) for name, hint in _hints(section).items()}
    return section(
        **{name: values[name] if part is None else _build(part, values) for name, part in inner.items()}
    )


def _nested(hint: Any) -> Any | None:
    """Return the dataclass whose fields stand in place of a field; ``None`` for a field that is an option itself."""
    plain, _, notes = _take_apart(hint)
    is_option = any(isinstance(note, click.ParamType) for note in notes)
    return plain if is_dataclass(plain) and not is_option else None


def _parameters(section: Any, heading: str = "") -> Iterator[Callable[[Callable[..., None]], object]]:
    """Yield the click decorators for all fields of a section, in order, and of sections nested in it: arguments for
    fields with ``Argument``, else options.

    ``heading`` begins before the first option.
    """
    hints = _hints(section)
    for field in dataclasses.fields(section):
        plain, is_many, notes = _take_apart(hints[field.name])
        heading = next((note.title for note in notes if isinstance(note, Heading)), heading)
        if (nested := _nested(hints[field.name])) is not None:
            yield from _parameters(nested, heading)
            heading = ""
            continue
        attributes: dict[str, Any] = {"required": field.default is dataclasses.MISSING}
        if field.default not in (dataclasses.MISSING, ()) and (field.default is not None or plain is bool):
            attributes["default"] = field.default
        argument = next((note for note in notes if isinstance(note, Argument)), None)
        if argument is not None:
            attributes |= {"type": _click_type(plain, notes), "metavar": argument.metavar}
            yield click.argument(field.name, nargs=-1 if is_many else 1, **attributes)
            continue
        option = _option(notes)
        if plain is bool:
            attributes["is_flag"] = True
        else:
            attributes |= {"type": _click_type(plain, notes), "multiple": is_many, "metavar": option.metavar}
        is_shown = bool(field.default) if option.show_default is None else option.show_default
        attributes["show_default"] = is_shown and "default" in attributes
        attributes["text"] = functools.partial(_help, section, field.name, option)
        attributes["heading"], heading = heading, ""
        yield click.option(
            *_names(field.name, notes),
            field.name,
            cls=_DocumentedOption,
            **attributes | option.click_attributes,
        )


def _option(notes: tuple[Any, ...]) -> Option:
    return next((note for note in notes if isinstance(note, Option)), Option())


def _names(field: str, notes: tuple[Any, ...]) -> tuple[str, ...]:
    for note in notes:
        if isinstance(note, Argument):
            return (note.metavar or field.upper(),)
    return _option(notes).names or (f"--{field.replace('_', '-')}",)


def _take_apart(hint: Any) -> tuple[Any, bool, tuple[Any, ...]]:
    """Return (plain type, several, notes) of a field's type: without None and ``Annotated``, of a tuple that of its
    elements.

    A tuple with a parameter type of its own is one value.
    """
    notes: tuple[Any, ...] = ()
    is_many = False
    while True:
        if get_origin(hint) is Annotated:
            hint, *more = get_args(hint)
            notes += tuple(more)
        elif get_origin(hint) in (Union, types.UnionType):
            (hint,) = (part for part in get_args(hint) if part is not types.NoneType)
        elif get_origin(hint) is tuple and not any(isinstance(note, click.ParamType) for note in notes):
            hint, is_many = get_args(hint)[0], True
        else:
            return hint, is_many, notes


def _click_type(plain: Any, notes: tuple[Any, ...]) -> Any:
    """Return click's type for a field: that in its notes, a range, a choice of literals, a path, or the plain type."""
    for note in notes:
        if isinstance(note, click.ParamType):
            return note
        if isinstance(note, ValueRange):
            is_open = note.above is not None, note.below is not None
            least = note.above if is_open[0] else note.at_least
            most = note.below if is_open[1] else note.at_most
            kind: Any = click.IntRange if plain is int else FiniteRange
            return kind(least, most, *is_open)
    if get_origin(plain) is Literal:
        return click.Choice(get_args(plain))
    return click.Path(path_type=Path) if plain is Path else plain


def _help(section: type, field: str, option: Option) -> str | None:
    return field_docs(section).get(field, option.text)


class _DocumentedOption(click.Option):
    """An option whose help is read when it is shown: to find the strings under the fields takes milliseconds."""

    def __init__(
        self, *args: Any, text: Callable[[], str | None], heading: str = "", **attributes: Any
    ) -> None:
        """Keep ``text``, which is called for the help when that is shown; ``heading`` begins a group in it. Other arguments are click's."""
        self._text = text
        self.heading = heading
        super().__init__(*args, **attributes)

    @property
    def help(self) -> str | None:
        return self._text()

    @help.setter  # noqa: A003
    def help(self, text: str | None) -> None:
        pass
