"""A model's chat template: the Jinja program that frames messages with special tokens.

It is untrusted, so it is rendered in a separate process (``phalanx.data.chat.renderer``).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from phalanx.data.chat.messages import Message, read_conversation, strings_in
from phalanx.data.chat.renderer import MARKS, RenderingError, renderer
from phalanx.data.errors import TokenizerError
from phalanx.data.tokenizers.published import CONFIG_FILE, decoded, read_bytes, read_config
from phalanx.data.tokenizers.tokenizer import END_OF_DOCUMENT
from phalanx.run.directory.files import read_named

TEMPLATE_FILE = "chat_template.jinja"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
_NAMED_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


_BEGIN, _END = MARKS
_MARKED = re.compile(f"({_BEGIN}|{_END})")
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class ChatTemplateError(Exception):
    """There is no chat template, or it cannot be used; the message names the file and the reason."""


@dataclass(frozen=True)
class ChatTemplate:
    """A template with the special tokens that it may use by name."""

    source: str
    special_tokens: Mapping[str, str]
    """Name to token, for example ``eos_token`` -> "</s>"."""

    @property
    def sha256(self) -> str:
        """Digest, in hex, of the template and its special tokens."""
        content = json.dumps([self.source, sorted(self.special_tokens.items())])
        return hashlib.sha256(content.encode()).hexdigest()

    @property
    def marks_answers(self) -> bool:
        """True if the template marks the assistant's text with ``{% generation %}``."""
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
        """Return the rendered ``messages``; with ``answer``, also the prompt for the assistant's answer.

        With ``today``, the template can read the date. ``variables`` are further variables. Raises ChatTemplateError.
        """
        text = self._rendered(messages, answer, tools, today, variables)
        return text.replace(_BEGIN, "").replace(_END, "")

    def render_marked(
        self, messages: Sequence[Message], tools: Sequence[object] | None = None
    ) -> tuple[str, list[range]]:
        """Return the rendered ``messages``, and the characters that the template marks as the assistant's. Raises ChatTemplateError."""
        text, spans = "", []
        for piece in _MARKED.split(self._rendered(messages, False, tools, False)):
            if piece == _BEGIN:
                start = len(text)
            elif piece == _END:
                spans.append(range(start, len(text)))
            else:
                text += piece
        return text, spans

    @property
    def own_variables(self) -> frozenset[str]:
        """Names of the variables that every conversation has."""
        return frozenset(("messages", "tools", "documents", "add_generation_prompt", *self.special_tokens))

    def names(self, word: str) -> bool:
        """Return True if the word occurs in the template: a template cannot read a variable it does not name."""
        return re.search(rf"\b{re.escape(word)}\b", self.source) is not None

    def _rendered(
        self,
        messages: Sequence[Message],
        answer: bool,
        tools: Sequence[object] | None,
        today: bool,
        more: Mapping[str, object] = MappingProxyType({}),
    ) -> str:
        """Render the messages in the sandboxed process, with marks. ``more`` are further variables; those of the
        template have priority. Raises ChatTemplateError.
        """
        variables = {
            **more,
            # As in vLLM: templates that trim or append a content would write null as "None", or fail.
            "messages": [
                {**message, "content": ""} if message.get("content", "") is None else message
                for message in messages
            ],
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
    """Return the template in ``file``, or else that of a publisher's ``folder``: its own file, or an entry of the
    tokenizer's configuration.

    Special tokens are from the folder's tokenizer. Of several named templates, "default" is taken. Raises
    ChatTemplateError if there is no template, or a file cannot be read.
    """
    try:
        config = read_config(folder)
        tokens = dict(config)
        # Older folders store the names of special tokens in another file.
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
    if isinstance(source, list):  # several named templates
        templates = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = templates.get("default")
    if not isinstance(source, str):
        raise ChatTemplateError(
            f"the model was published without a chat template (neither {TEMPLATE_FILE} nor chat_template in {CONFIG_FILE} of {folder})"
        )
    contents = {name: _content(tokens.get(name)) for name in _NAMED_TOKENS}
    return ChatTemplate(source, {name: content for name, content in contents.items() if content is not None})


def template_beside(tokenizer: Path, file: Path | None = None) -> ChatTemplate:
    """Return the template in ``file``, or else that beside a tokenizer (a file or its folder). Raises ``TokenizerError`` if there is none."""
    try:
        return read_chat_template(tokenizer if tokenizer.is_dir() else tokenizer.parent, file)
    except ChatTemplateError as error:
        raise TokenizerError(
            f"{error}: name one with --chat-template, or in a recipe with output.chat_template"
        ) from error


def _content(token: object) -> str | None:
    """Return the text of a special token, which may be a table; ``None`` if it has none."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


# A chat template for a tokenizer that will be trained on the conversations. Its special tokens are those that the template spells.
#
# A turn must end with one special token: as ordinary text it would be several tokens, and a server could not stop at it.


_PAD = "<|pad|>"
_NAMES = {"bos_token": "<|begin_of_text|>", "eos_token": END_OF_DOCUMENT, "unk_token": "<|unk|>"}
"""Token for each name that a template may use."""
_SPELLED = re.compile(r"<\|[^|<>\s{}]{1,40}\|>|</?[A-Za-z_]\w{0,39}>|\[/?[A-Z_]{2,20}\]")
"""Special tokens as published templates spell them: ``<|im_start|>``, ``<start_of_turn>``, ``[INST]``."""


@dataclass(frozen=True)
class UntrainedChat:
    """A template, and the special tokens of a tokenizer for it."""

    template: ChatTemplate
    special_tokens: tuple[str, ...]
    """Special tokens by id, from 1 on; 0 is ``END_OF_DOCUMENT``."""

    @property
    def end(self) -> int:
        """The id of the token that ends a conversation; the template does not write it."""
        return self.special_tokens.index(_PAD) + 1 if _PAD in self.special_tokens else 0


def untrained_chat(template: ChatTemplate) -> UntrainedChat:
    """Return the template with the special tokens that its source names or spells, for a tokenizer that is still to
    be trained. If the end of a document is one of them, padding gets a token of its own.
    """
    source = template.source
    named = {name: token for name, token in _NAMES.items() if name in source}
    spelled = dict.fromkeys(_SPELLED.findall(source))
    if END_OF_DOCUMENT in (*named.values(), *spelled):
        named["pad_token"] = _PAD
    tokens = dict.fromkeys((*named.values(), *spelled))
    return UntrainedChat(
        ChatTemplate(source, named), tuple(token for token in tokens if token != END_OF_DOCUMENT)
    )


def read_bare_template(file: Path) -> ChatTemplate:
    """Return the template in a UTF-8 file, without names of special tokens. Raises ``TokenizerError`` if it cannot be read."""
    try:
        return ChatTemplate(read_named(file), {})
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"the chat template {file} cannot be read: {error}") from error


def texts_of(conversation: str) -> Iterator[str]:
    """Yield the texts in a conversation (a line of ``conversation_text``) for training a tokenizer."""
    parts = read_conversation(conversation)
    for value in (*parts.messages, parts.tools):
        yield from strings_in(value)
