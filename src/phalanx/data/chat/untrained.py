"""A chat template for a tokenizer that is still to be trained on the conversations: the special tokens are those that the template spells.

A turn must end with a special token: text that spells it is several tokens, which a model may write half of, and a server cannot stop at.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from phalanx.data.chat.messages import read_conversation, strings_in
from phalanx.data.chat.template import ChatTemplate
from phalanx.data.errors import TokenizerError
from phalanx.data.tokenizers.tokenizer import END_OF_DOCUMENT

_PAD = "<|pad|>"
_NAMES = {"bos_token": "<|begin_of_text|>", "eos_token": END_OF_DOCUMENT, "unk_token": "<|unk|>"}
"""The token for each name that a template may use."""
_SPELLED = re.compile(r"<\|[^|<>\s{}]{1,40}\|>|</?[A-Za-z_]\w{0,39}>|\[/?[A-Z_]{2,20}\]")
"""Special tokens as published templates spell them: ``<|im_start|>``, ``<start_of_turn>``, ``[INST]``."""


@dataclass(frozen=True)
class UntrainedChat:
    """A template, and the special tokens that a tokenizer for it has."""

    template: ChatTemplate
    special_tokens: tuple[str, ...]
    """In the order of their ids, after that of ``END_OF_DOCUMENT``, which is 0."""

    @property
    def end(self) -> int:
        """The id of the token that ends a conversation, which the template does not yield."""
        return self.special_tokens.index(_PAD) + 1 if _PAD in self.special_tokens else 0


def untrained_chat(template: ChatTemplate) -> UntrainedChat:
    """The special tokens for ``template``: those that its source names or spells."""
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
    """The template in a file, without names of special tokens. Raises ``TokenizerError``."""
    try:
        return ChatTemplate(file.read_text(encoding="utf-8"), {})
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"the chat template {file} cannot be read: {error}") from error


def texts_of(conversation: str) -> Iterator[str]:
    """The texts in a conversation (a line of ``conversation_text``), for a tokenizer to learn from."""
    parts = read_conversation(conversation)
    for value in (*parts.messages, parts.tools):
        yield from strings_in(value)
