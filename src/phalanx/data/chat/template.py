"""A model's chat template: the Jinja program, published with it, that frames messages by its special tokens.

It is rendered in a process of its own (``phalanx.data.chat.renderer``), since it is a stranger's program.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from phalanx.data.chat.messages import Message
from phalanx.data.chat.renderer import MARKS, RenderingError, renderer
from phalanx.data.errors import TokenizerError
from phalanx.data.tokenizers.published.files import CONFIG_FILE, decoded, read_bytes, read_config

TEMPLATE_FILE = "chat_template.jinja"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
_NAMED_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


_BEGIN, _END = MARKS
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
        variables: Mapping[str, object] = MappingProxyType({}),
    ) -> str:
        """The text of ``messages``; if ``answer``, up to where the assistant's answer to them begins.

        ``today``: The template may ask for the date. ``variables`` are further ones that it reads. Raises ChatTemplateError.
        """
        text = self._rendered(messages, answer, tools, today, variables)
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

    @property
    def own_variables(self) -> frozenset[str]:
        """The names of the variables that every conversation has."""
        return frozenset(("messages", "tools", "documents", "add_generation_prompt", *self.special_tokens))

    def names(self, word: str) -> bool:
        """Return True if the word is in the template: what is not there it cannot read."""
        return re.search(rf"\b{re.escape(word)}\b", self.source) is not None

    def _rendered(
        self,
        messages: Sequence[Message],
        answer: bool,
        tools: Sequence[object] | None,
        today: bool,
        more: Mapping[str, object] = MappingProxyType({}),
    ) -> str:
        variables = {
            **more,
            "messages": list(messages),
            "tools": tools,
            "documents": None,
            "add_generation_prompt": answer,
            **self.special_tokens,
        }
        try:
            return renderer().render(self.source, variables, today=today)
        except RenderingError as error:
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
            path = file or folder / TEMPLATE_FILE
            source: object = decoded(read_bytes(path), path)
        else:
            source = config.get("chat_template")
    except (TokenizerError, OSError) as error:
        raise ChatTemplateError(
            f"the chat template {file or f'in {folder}'} cannot be read: {error}"
        ) from error
    if isinstance(source, list):  # several, each with a name
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    if not isinstance(source, str):
        raise ChatTemplateError(
            f"the model was published without a chat template (neither {TEMPLATE_FILE} nor chat_template in {CONFIG_FILE} of {folder})"
        )
    contents = {name: _content(tokens.get(name)) for name in _NAMED_TOKENS}
    return ChatTemplate(source, {name: content for name, content in contents.items() if content is not None})


def template_beside(tokenizer: Path, file: Path | None = None) -> ChatTemplate:
    """The template beside a tokenizer, a file or its folder; or the one in ``file``. Raises ``TokenizerError`` if there is none."""
    try:
        return read_chat_template(tokenizer if tokenizer.is_dir() else tokenizer.parent, file)
    except ChatTemplateError as error:
        raise TokenizerError(
            f"{error}: name one with --chat-template, or in a recipe with output.chat_template"
        ) from error


def _content(token: object) -> str | None:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None
