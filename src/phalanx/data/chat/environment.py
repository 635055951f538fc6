"""The Jinja environment of chat templates, the same as in ``transformers`` (its ``chat_template_utils.py``).

Templates are untrusted programs, so it is a sandbox. It trims line breaks around blocks, and provides ``raise_exception`` and ``strftime_now``.
``{% generation %}`` marks what the assistant wrote.
"""

from __future__ import annotations

import datetime
import functools
import json
import math
import resource
import sys
from collections.abc import Callable, Iterable

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from phalanx.data.chat.renderer import CPU_S, MARKS, MEMORY_BYTES

CHARACTERS = 32 << 20
"""Maximum length of a rendered conversation."""


def joined(pieces: Iterable[str]) -> str:
    """Return the pieces as one text. Raises SecurityError for more than ``CHARACTERS`` characters."""
    parts, size = [], 0
    for piece in pieces:
        parts.append(piece)
        size += len(piece)
        if size > CHARACTERS:
            raise jinja2.exceptions.SecurityError(f"it writes more than {CHARACTERS} characters")
    return "".join(parts)


@functools.lru_cache(maxsize=8)
def compiled(source: str, today: bool) -> jinja2.Template:
    """Return the compiled template; unless ``today``, it cannot read the date.

    Cached. Raises jinja2's errors for a template that cannot be parsed.
    """
    environment = _environment()
    if not today:
        del environment.globals["strftime_now"]
    return environment.from_string(source)


def syntax_error(source: str) -> str:
    """Return the template's syntax error with its line number; empty if there is none."""
    try:
        _environment().parse(source)
    except jinja2.TemplateSyntaxError as error:
        return f"line {error.lineno}: {error.message}"
    return ""


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Return the sandboxed Jinja environment, with the filters and globals that published templates use."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _Namespace
    environment.globals["dict"] = _dict
    return environment


class _Generation(jinja2.ext.Extension):
    """The ``{% generation %}`` block: puts marks around its content."""

    tags = {"generation"}  # noqa: RUF012  jinja2's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Parse ``{% generation %}`` up to its end into a call of ``_marked`` around its body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return f"{MARKS[0]}{caller()}{MARKS[1]}"


class _Namespace(jinja2.utils.Namespace):
    """Jinja's ``namespace`` without attributes that give a template access to Python's internals."""

    def __setitem__(self, name: str, value: object) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a chat template may not set {name!r} on a namespace")
        super().__setitem__(name, value)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return ``value`` as JSON, without Jinja's escapes of HTML characters."""
    # Jinja's own filter escapes HTML characters.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _dict(entries: Iterable[tuple[str, object]] = (), /, **more: object) -> dict[str, object]:
    return dict(entries, **more)


# The process that ``phalanx.data.chat.renderer`` starts: it reads requests and writes replies as lines of JSON.


_MOST_REASON = 2_000


def main() -> None:
    """Render conversations until standard input ends or a template runs out of memory.

    Limits this process's memory, and its processor time for each request. Reads one JSON request a line, writes one
    JSON reply a line.
    """
    _limit(resource.RLIMIT_AS, MEMORY_BYTES)
    _limit(resource.RLIMIT_CORE, 0)
    for line in sys.stdin.buffer:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, math.ceil(usage.ru_utime + usage.ru_stime) + CPU_S)
        reply = _reply(line)
        sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n")
        sys.stdout.buffer.flush()
        if reply.get("is_last"):
            return


def _limit(kind: int, soft: int) -> None:
    """Set the soft limit of a resource to ``soft``, or to the hard limit if that is lower."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _reply(line: bytes) -> dict[str, object]:
    """Render the request on ``line``, JSON with source, variables and ``today``. Return the text, or the error's
    first characters; ``is_last`` is true after a lack of memory.
    """
    try:
        request = json.loads(line)
        pieces = compiled(request["source"], request["today"]).generate(**request["variables"])
        return {"text": joined(pieces)}
    except MemoryError:
        return {"error": f"it takes more than {MEMORY_BYTES:,} bytes of memory", "is_last": True}
    except Exception as error:  # an untrusted program may raise any exception
        return {"error": str(error)[:_MOST_REASON], "is_last": False}


if __name__ == "__main__":
    main()
