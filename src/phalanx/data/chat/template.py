"""A model's chat template: the Jinja program, published with it, that frames messages by its special tokens.

The environment is the one that ``transformers`` gives such templates (its ``chat_template_utils.py``): a sandbox, since a
template is a stranger's program; blocks without the line breaks around them; ``raise_exception`` and ``strftime_now``. ``{% generation %}``
marks what the assistant wrote.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.utils

from phalanx.data.chat.bounds import BoundedEnvironment, bounded_lines, joined
from phalanx.data.chat.messages import Message
from phalanx.data.errors import TokenizerError
from phalanx.data.tokenizers.published.files import CONFIG_FILE, read_config

TEMPLATE_FILE = "chat_template.jinja"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
_NAMED_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


_BEGIN, _END = "\U0010f0aa\U0010f0bb", "\U0010f0bb\U0010f0aa"
"""Characters for private use, around what ``{% generation %}`` encloses."""
MARKS = (_BEGIN, _END)
_MARKED = re.compile(f"({_BEGIN}|{_END})")
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class ChatTemplateError(Exception):
    """There is no chat template, or it cannot be used; the message says which file and why."""


@dataclass(frozen=True)
class ChatTemplate:
    """A template with the special tokens that it may name."""

    source: str
    special_tokens: Mapping[str, str]
    """Such as ``eos_token`` -> "</s>"."""

    @property
    def sha256(self) -> str:
        """Digest, in hex, of the template and its special tokens."""
        content = json.dumps([self.source, sorted(self.special_tokens.items())])
        return hashlib.sha256(content.encode()).hexdigest()

    @property
    def marks_answers(self) -> bool:
        """True if the template itself says what the assistant wrote, by ``{% generation %}``."""
        return _GENERATION.search(self.source) is not None

    def render(
        self,
        messages: Sequence[Message],
        *,
        answer: bool,
        tools: Sequence[object] | None = None,
        today: bool = True,
        bounded: bool = False,
    ) -> str:
        """The text of ``messages``; if ``answer``, up to where the assistant's answer to them begins.

        ``today``: The template may ask for the date. ``bounded``: It is ended if it does not end by itself, at the price of some
        milliseconds. Raises ChatTemplateError.
        """
        with bounded_lines() if bounded else nullcontext():
            text = self._rendered(messages, answer, tools, today)
        return text.replace(_BEGIN, "").replace(_END, "")

    def render_marked(
        self, messages: Sequence[Message], tools: Sequence[object] | None = None
    ) -> tuple[str, list[range]]:
        """The text of ``messages``, and which of its characters the template marks as the assistant's. Raises ChatTemplateError."""
        text, spans = "", []
        for piece in _MARKED.split(self._rendered(messages, False, tools, False)):
            if piece == _BEGIN:
                begun = len(text)
            elif piece == _END:
                spans.append(range(begun, len(text)))
            else:
                text += piece
        return text, spans

    def _rendered(
        self, messages: Sequence[Message], answer: bool, tools: Sequence[object] | None, today: bool
    ) -> str:
        try:
            return joined(
                _compiled(self.source, today).generate(
                    messages=list(messages),
                    tools=tools,
                    documents=None,
                    add_generation_prompt=answer,
                    **self.special_tokens,
                )
            )
        except Exception as error:  # a stranger's program may raise anything
            raise ChatTemplateError(
                f"the model's chat template cannot frame the messages: {error}"
            ) from error


def read_chat_template(folder: Path, file: Path | None = None) -> ChatTemplate:
    """The template in a publisher's ``folder``: its own file, or an entry of the tokenizer's configuration; or the one in ``file``.

    Special tokens are those of the folder's tokenizer. Raises ChatTemplateError if there is no template.
    """
    try:
        config = read_config(folder)
        tokens = dict(config)
        # Older folders keep the special tokens' names apart.
        if "added_tokens_decoder" not in config and (folder / SPECIAL_TOKENS_FILE).exists():
            tokens |= read_config(folder, SPECIAL_TOKENS_FILE)
        if file is not None or (folder / TEMPLATE_FILE).exists():
            source: object = (file or folder / TEMPLATE_FILE).read_text(encoding="utf-8")
        else:
            source = config.get("chat_template")
    except (TokenizerError, OSError, UnicodeDecodeError) as error:
        raise ChatTemplateError(f"the chat template in {folder} cannot be read: {error}") from error
    if isinstance(source, list):  # several, each with a name
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    if not isinstance(source, str):
        raise ChatTemplateError(
            f"the model was published without a chat template (neither {TEMPLATE_FILE} nor chat_template in {CONFIG_FILE} of {folder})"
        )
    contents = {name: _content(tokens.get(name)) for name in _NAMED_TOKENS}
    return ChatTemplate(source, {name: content for name, content in contents.items() if content is not None})


def _content(token: object) -> str | None:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


@functools.lru_cache(maxsize=8)
def _compiled(source: str, today: bool) -> jinja2.Template:
    environment = _environment()
    if not today:
        del environment.globals["strftime_now"]
    return environment.from_string(source)


def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _Namespace
    environment.globals["dict"] = _dict
    return environment


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` puts marks around its content."""

    tags = {"generation"}  # noqa: RUF012  jinja2's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return f"{_BEGIN}{caller()}{_END}"


class _Namespace(jinja2.utils.Namespace):
    """Jinja's ``namespace`` without the attributes through which a template could reach Python's internals."""

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
    # Jinja's own escapes what HTML would read.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _dict(entries: Iterable[tuple[str, object]] = (), /, **more: object) -> dict[str, object]:
    return dict(entries, **more)
