"""The arguments of a program that this software starts itself: a dataclass on both sides, and options of a command line in between.

The option of a field is its name. (``phalanx.command`` has the options of commands that people give.)
"""

from __future__ import annotations

import argparse
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Literal, TypeVar, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_T = TypeVar("_T", bound="DataclassInstance")


def words_of(args: DataclassInstance) -> list[str]:
    """Return the words of a command line from which ``parsed`` makes ``args`` again. Fields with their default are left out."""
    words: list[str] = []
    for field in fields(args):
        value = getattr(args, field.name)
        if value != field.default:
            option = _option(field.name)
            values = () if value is True else value if isinstance(value, tuple) else (value,)
            texts = [str(value) for value in values]
            if not any(text.startswith("-") for text in texts):
                words += [option, *texts]
            else:  # a word with a hyphen would be an option of its own
                words += [
                    *([option] if isinstance(value, tuple) else []),
                    *(f"{option}={text}" for text in texts),
                ]
    return words


def parsed(kind: type[_T], program: str) -> _T:
    """Parse this process's command line; exit with code 2 if it is not one of ``kind``.

    Fields are texts, numbers, paths, flags that are false by default, choices, tuples of these, or these or None.
    """
    parser = argparse.ArgumentParser(prog=program)
    hints = get_type_hints(kind)
    for field in fields(kind):
        hint, option = hints[field.name], _option(field.name)
        if hint is bool:
            parser.add_argument(option, action="store_true")
            continue
        is_tuple = get_origin(hint) is tuple
        parser.add_argument(
            option,
            type=str if get_origin(hint) is Literal else (*get_args(hint), hint)[0],
            action="extend" if is_tuple else "store",
            nargs="*" if is_tuple else None,
            required=field.default is MISSING,
            default=argparse.SUPPRESS if is_tuple else field.default,  # else the words would extend it
        )
    values = vars(parser.parse_args())
    return kind(
        **{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    )


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
