"""Text side of a served model: tokenizer, chat template, end tokens, name."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from phalanx.data.chat.environment import syntax_error
from phalanx.data.chat.kept import turn_ends
from phalanx.data.chat.template import ChatTemplate, ChatTemplateError, read_chat_template
from phalanx.data.errors import TokenizerError
from phalanx.data.tokenizers.published.byte_fallback import FallbackTokenizer
from phalanx.data.tokenizers.tokenizer import BpeTokenizer, Tokenizer
from phalanx.run.directory.paths import RunDirectory
from phalanx.serve.http.access.admission import LengthLimit
from phalanx.serve.http.protocol import Chat, RefusedError
from phalanx.serve.prompt import (
    Framing,
    FramingError,
    encode_prompt,
    frame_messages,
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

    def prompt_ids(self, prompt: str | list[int], room: LengthLimit, *, begin: bool = True) -> list[int]:
        """The ids of a prompt; ``begin`` puts before a text what its model's texts begin with. Raises RefusedError for one that is too long, and
        for ids that the model does not have."""
        if not isinstance(prompt, str):
            if not prompt:
                raise RefusedError("prompt: an empty list", "prompt")
            room.require(len(prompt), 1, "prompt")
            return self._require_known(prompt, "prompt")
        room.require_text(prompt, self.tokenizer.longest_token, "prompt")
        try:
            encoded = encode_prompt(self.tokenizer, prompt) if begin else self.tokenizer.encode(prompt)
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

    def chat_ids(self, body: Chat, room: LengthLimit) -> list[int]:
        """The ids of a conversation, up to where the answer begins. Raises RefusedError."""
        if self.template is None:
            raise RefusedError(
                f"the model {self.name!r} has no chat template: use /v1/completions, which continues text, or start the server with "
                "--chat-template FILE",
                "messages",
            )
        if body.continue_final_message and body.add_generation_prompt:
            raise RefusedError(
                "continue_final_message: the last message is continued, or another one begun: set add_generation_prompt to false",
                "continue_final_message",
            )
        answer = (
            not body.continue_final_message
            if body.add_generation_prompt is None
            else body.add_generation_prompt
        )
        framing = Framing(
            answer, body.continue_final_message, body.tools or (), body.chat_template_kwargs or {}
        )
        try:
            text = frame_messages(self.template, self.tokenizer, body.messages, framing)
        except TokenizerError as error:
            field_name = error.field if isinstance(error, FramingError) else "messages"
            raise RefusedError(str(error), field_name) from error
        room.require_text(text, self.tokenizer.longest_token, "messages")
        assert isinstance(self.tokenizer, BpeTokenizer | FallbackTokenizer), "others have no template"
        try:
            encoded = self.tokenizer.encode_template(text)
        except UnicodeError as error:
            raise RefusedError(f"messages: cannot be encoded: {error}", "messages") from error
        return self._require_known(encoded, "messages")


def read_model_text(run_dir: Path, name: str, vocab_size: int, chat_template: str = "") -> ModelText:
    """The words of a run's model; ``chat_template`` is a file in the place of its own. Raises TokenizerError."""
    tokenizer = load_run_tokenizer(run_dir)
    published = published_with(run_dir, tokenizer)
    templates = template_folder(run_dir, published)
    stop = stop_tokens(published, tokenizer, templates)
    template: ChatTemplate | None = None
    try:
        if chat_template:
            if not isinstance(tokenizer, BpeTokenizer | FallbackTokenizer):
                raise TokenizerError(
                    f"--chat-template {chat_template}: the run's tokenizer of bytes frames no conversations; leave the option out and use "
                    "/v1/completions"
                )
            named = templates or RunDirectory(run_dir).tokenizer
            template = custom = read_chat_template(named, Path(chat_template))
            if problem := syntax_error(custom.source):
                raise TokenizerError(f"--chat-template {chat_template}: {problem}; mend the template")
        elif templates is not None:
            template = read_chat_template(templates)
    except ChatTemplateError as error:
        if chat_template:
            raise TokenizerError(str(error)) from error
        # Only /v1/chat/completions needs one, and its error names it.
    if chat_template and template is not None:
        stop |= turn_ends(template, tokenizer)
    return ModelText(name, tokenizer, stop, vocab_size, template)
