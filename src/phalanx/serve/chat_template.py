"""A model's chat template: the Jinja program, published with it, that frames messages by its special tokens.

The environment is the one that ``transformers`` gives such templates (its ``chat_template_utils.py``): a sandbox, since a
template is a stranger's program; blocks without the line breaks around them; ``raise_exception`` and ``strftime_now``.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from phalanx.checkpoint.interop.huggingface.config import HuggingFaceError
from phalanx.checkpoint.interop.huggingface.folders import read_json
from phalanx.data.published_tokenizers.files import CONFIG_FILE

TEMPLATE_FILE = "chat_template.jinja"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
_NAMED_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


class ChatTemplateError(Exception):
    """There is no chat template, or it cannot be used; the message says which file and why."""


@dataclass(frozen=True)
class ChatTemplate:
    """A template with the special tokens that it may name."""

    source: str
    special_tokens: Mapping[str, str]

    def render(self, message: str) -> str:
        """The text of one user's ``message``, up to where the answer begins. Raises ChatTemplateError."""
        try:
            return (
                _environment()
                .from_string(self.source)
                .render(
                    messages=[{"role": "user", "content": message}],
                    tools=None,
                    documents=None,
                    add_generation_prompt=True,
                    **self.special_tokens,
                )
            )
        except Exception as error:  # a stranger's program may raise anything
            raise ChatTemplateError(f"the model's chat template cannot frame the message: {error}") from error


def read_chat_template(folder: Path) -> ChatTemplate:
    """The template in a publisher's ``folder``: its own file, or an entry of the tokenizer's configuration.

    Raises ChatTemplateError if there is none.
    """
    try:
        config = read_json(folder / CONFIG_FILE) if (folder / CONFIG_FILE).exists() else {}
        tokens = dict(config)
        # Older folders keep the special tokens' names apart.
        if "added_tokens_decoder" not in config and (folder / SPECIAL_TOKENS_FILE).exists():
            tokens |= read_json(folder / SPECIAL_TOKENS_FILE)
        if (folder / TEMPLATE_FILE).exists():
            source: object = (folder / TEMPLATE_FILE).read_text(encoding="utf-8")
        else:
            source = config.get("chat_template")
    except (HuggingFaceError, OSError, UnicodeDecodeError) as error:
        raise ChatTemplateError(f"the chat template in {folder} cannot be read: {error}") from error
    if isinstance(source, list):  # several, each with a name
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    if not isinstance(source, str):
        raise ChatTemplateError(
            f"the model was published without a chat template (neither {TEMPLATE_FILE} nor chat_template in {CONFIG_FILE}); "
            "leave out --chat"
        )
    contents = {name: _content(tokens.get(name)) for name in _NAMED_TOKENS}
    return ChatTemplate(source, {name: content for name, content in contents.items() if content is not None})


def _content(token: object) -> str | None:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
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
    """``{% generation %}`` marks what an assistant wrote, for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012  jinja2's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


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
