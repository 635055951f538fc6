"""Text side of a served model: tokenizer, chat template, end tokens, name."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from phalanx.data.chat.template import ChatTemplate, ChatTemplateError, read_chat_template
from phalanx.data.errors import TokenizerError
from phalanx.data.tokenizers.tokenizer import Tokenizer
from phalanx.serve.http.protocol import ChatMessage, RefusedError
from phalanx.serve.prompt import (
    encode_messages,
    encode_prompt,
    load_run_tokenizer,
    published_with,
    stop_tokens,
    template_folder,
)


@dataclass(frozen=True)
class ModelText:
    """A model's name and its words."""

    name: str
    tokenizer: Tokenizer
    stop_tokens: frozenset[int]
    vocab_size: int
    template: ChatTemplate | None = None
    texts: dict[int, str] = field(default_factory=dict, repr=False, compare=False)
    """The texts of tokens that were decoded before; filled by use."""

    @property
    def note(self) -> str:
        """A warning if the tokenizer has tokens that the model does not have; else empty."""
        if self.tokenizer.vocab_size <= self.vocab_size:
            return ""
        return (
            f"the tokenizer has {self.tokenizer.vocab_size} tokens and the model {self.vocab_size}: texts with one of those that the model does "
            "not have are refused; put the tokenizer that it was trained with into the run's folder tokenizer"
        )

    def prompt_ids(self, prompt: str | list[int]) -> list[int]:
        """The ids of a prompt. Raises RefusedError for ids that the model does not have."""
        if not isinstance(prompt, str):
            if not prompt:
                raise RefusedError("prompt: an empty list", "prompt")
            return self._require_known(prompt, "prompt")
        try:
            encoded = encode_prompt(self.tokenizer, prompt)
        except (UnicodeError, ValueError) as error:
            raise RefusedError(f"prompt: cannot be encoded: {error}", "prompt") from error
        return self._require_known(encoded, "prompt")

    def _require_known(self, ids: list[int], field_name: str) -> list[int]:
        for token_id in ids:
            if not 0 <= token_id < self.vocab_size:
                because = f"; {self.note}" if self.note else ""
                raise RefusedError(
                    f"{field_name}: token id {token_id} is outside the vocabulary of {self.vocab_size}{because}",
                    field_name,
                )
        return ids

    def chat_ids(self, messages: list[ChatMessage]) -> list[int]:
        """The ids of a conversation up to where the answer begins. Raises RefusedError."""
        if self.template is None:
            raise RefusedError(
                f"the model {self.name!r} has no chat template: use /v1/completions, which continues text",
                "messages",
            )
        # OpenAI's clients send null for a text that is not there.
        turns = [
            {"role": message.role, "content": "" if message.content is None else message.content}
            for message in messages
        ]
        try:
            encoded = encode_messages(self.template, self.tokenizer, turns)
        except (TokenizerError, UnicodeError) as error:
            raise RefusedError(str(error), "messages") from error
        return self._require_known(encoded, "messages")


def read_model_text(run_dir: Path, name: str, vocab_size: int) -> ModelText:
    """The words of a run's model. Raises TokenizerError and ChatTemplateError."""
    tokenizer = load_run_tokenizer(run_dir)
    published = published_with(run_dir, tokenizer)
    templates, template = template_folder(run_dir, published), None
    if templates is not None:
        try:
            template = read_chat_template(templates)
        except ChatTemplateError:
            template = None  # Only /v1/chat/completions needs one, and its error names it.
    return ModelText(name, tokenizer, stop_tokens(published, tokenizer, templates), vocab_size, template)
