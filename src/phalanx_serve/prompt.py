"""Prompts, chat messages and end tokens, as a model was trained on them; and the text side of a served model.

A tokenizer may put a token before each text, and a model that was trained with it generates other text without it. A chat model was
trained on messages that its published Jinja template frames with special tokens. Its turns may end with another token than a document.
All of that is read from the run's tokenizer, and for an imported model from its publisher's files. Ids are those of ``transformers``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.checkpoint.interop.huggingface.folders import (
    CONFIG,
    GENERATION_CONFIG,
    keeps_tokenizer,
    read_json,
)
from phalanx.checkpoint.interop.huggingface.stored_folder import published_folder
from phalanx.data.chat.encode import turn_ends
from phalanx.data.chat.environment import syntax_error
from phalanx.data.chat.messages import Message, parsed_call
from phalanx.data.chat.template import TEMPLATE_FILE, ChatTemplate, ChatTemplateError, read_chat_template
from phalanx.data.errors import TokenizerError
from phalanx.data.tokenizers.published import PublishedTokenizer
from phalanx.data.tokenizers.tokenizer import END_OF_DOCUMENT, Tokenizer, load_own_tokenizer, load_tokenizer
from phalanx.run.directory.paths import RunDirectory, read_resolved
from phalanx.run.read import addresses
from phalanx_serve.http.admission import LengthLimit
from phalanx_serve.http.protocol import Chat, RefusedError

_ROLES = ("system", "developer", "user", "assistant", "tool")
_CONTINUED = "\U0010f0ac\U0010f0ad"
"""Private-use characters that mark the end of the message to continue."""


class FramingError(TokenizerError):
    """A conversation cannot be framed as requested; ``field`` names the field at fault beside the messages."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


@dataclass(frozen=True)
class Framing:
    """How a chat template frames a conversation, beside its messages."""

    answer: bool = True
    """True if the text ends where the assistant's answer begins."""
    continued: bool = False
    """True if the text ends within the last message, which is to be continued."""
    tools: Sequence[object] = ()
    variables: Mapping[str, object] = field(default_factory=dict)
    """Further template variables."""


def load_run_tokenizer(run_dir: Path) -> Tokenizer:
    """Return the tokenizer of a run: the copy in its directory, else the one of its first dataset. Raises
    TokenizerError.

    Only a run that was started has a dataset: the run file of an imported model names one by default, which is not
    the model's.
    """
    directory = RunDirectory(run_dir)
    if directory.tokenizer.is_dir():
        return load_own_tokenizer(directory)
    of_dataset = Path(next(iter(addresses(read_resolved(directory).data).values())))
    if not directory.record.exists() or not of_dataset.is_dir():
        if (model := published_folder(directory)) is not None:
            raise TokenizerError(
                f"{model} has no tokenizer that can be used here; put its tokenizer.json there, or give tokens where they are taken"
            )
        raise TokenizerError(
            f"{run_dir} has no tokenizer (an imported model may come without one that can be used here); put a "
            f"tokenizer.json into {directory.tokenizer}"
        )
    return load_tokenizer(of_dataset)


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a prompt. An empty prompt begins as a document does, after the end of the one before."""
    return [*tokenizer.document_start, *tokenizer.encode(text)] or [tokenizer.end_of_document]


def published_with(run_dir: Path, tokenizer: Tokenizer) -> Path | None:
    """Return the folder of the publisher's files of the run's imported model, or None if there are none or they are
    of another tokenizer.

    The check loads the published tokenizer, which takes a second for a large one.
    """
    directory = RunDirectory(run_dir)
    # For a stand-in of a published model, messages name the model's own folder instead of a temporary copy.
    folder = published_folder(directory) or directory.published
    return folder if folder.is_dir() and keeps_tokenizer(folder, tokenizer) else None


def template_folder(run_dir: Path, published: Path | None) -> Path | None:
    """Return the folder of a run's chat template: its tokenizer's if it was trained on conversations, else
    ``published``.

    ``published`` is the result of ``published_with``; None if there is no template either way.
    """
    own = RunDirectory(run_dir).tokenizer
    return own if (own / TEMPLATE_FILE).exists() else published


def encode_chat(folder: Path | None, tokenizer: Tokenizer, message: str) -> list[int]:
    """Return the ids of a user's ``message`` in the chat template in ``folder`` (``template_folder``), up to the
    start of the answer.

    Raises TokenizerError if there is no template, or if it refuses the message.
    """
    try:
        template = None if folder is None else read_chat_template(folder)
        return encode_messages(template, tokenizer, [{"role": "user", "content": message}])
    except (TokenizerError, ChatTemplateError) as error:
        raise TokenizerError(f"{error}; leave out --chat") from error


def encode_messages(
    template: ChatTemplate | None, tokenizer: Tokenizer, messages: Sequence[Mapping[str, object]]
) -> list[int]:
    """Return the ids of a conversation in a model's chat ``template``, up to the start of the assistant's answer.
    Raises TokenizerError as ``frame_messages`` does.
    """
    text = frame_messages(template, tokenizer, messages)
    assert isinstance(tokenizer, PublishedTokenizer), "others have no template"
    return tokenizer.encode_template(text)


def frame_messages(
    template: ChatTemplate | None,
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, object]],
    framing: Framing | None = None,
) -> str:
    """Return the text of a conversation in a model's chat ``template``, by default up to the start of the answer.

    A message has a ``role`` (system, developer, user, assistant, tool) and a ``content``: a text, or a list of parts
    of type text, which are joined; and other fields that the template names, such as ``tool_calls``. ``framing`` sets
    tools, variables, and whether the last message is continued.

    Raises TokenizerError if there is no template, if it refuses the messages or does not come to an end, or for what
    it would leave out of them. Raises its subclass FramingError, with the field, for a ``framing`` that cannot be
    done.
    """
    if not isinstance(tokenizer, PublishedTokenizer) or template is None:
        raise TokenizerError(
            "there is no chat template for this run: one comes with an imported model, for as long as the run has its tokenizer, or with a dataset "
            "of conversations (phalanx data prepare --layout chat)"
        )
    framing = framing or Framing()
    plain = plain_messages(messages, template)
    for name in framing.variables:
        if name in ("add_generation_prompt", "continue_final_message"):
            raise FramingError(f"{name} is a field of the request: set it there", "chat_template_kwargs")
        if name in template.own_variables or not template.names(name):
            raise FramingError(f"the chat template has no variable {name!r} to set", "chat_template_kwargs")
    if framing.tools and not template.names("tools"):
        raise FramingError(
            "the model's chat template does not write them; describe them in a message", "tools"
        )
    if framing.continued:
        if plain[-1]["content"] is None:
            raise FramingError("the last message has no content to continue", "continue_final_message")
        plain[-1] = plain[-1] | {"content": f"{plain[-1]['content']}{_CONTINUED} "}
    try:
        text = template.render(
            plain, answer=framing.answer, tools=framing.tools or None, variables=framing.variables
        )
    except ChatTemplateError as error:
        raise TokenizerError(f"{error}; mend it") from error
    if not framing.continued:
        return text
    # As in transformers: a template that trims messages has also trimmed the space after the mark.
    text, mark, tail = text.rpartition(_CONTINUED)
    if not mark:
        raise FramingError(
            "the model's chat template does not write the last message", "continue_final_message"
        )
    return text if tail.startswith(" ") else text.rstrip()


def plain_messages(messages: Sequence[Mapping[str, object]], template: ChatTemplate) -> list[Message]:
    """Return the messages as templates expect them, with one text as each content. Raises TokenizerError, naming
    message and field.
    """
    if not messages:
        raise TokenizerError("messages: there is none; give at least one of the user")
    return [_plain_message(number, message, template) for number, message in enumerate(messages)]


def _plain_message(number: int, message: Mapping[str, object], template: ChatTemplate) -> Message:
    """Return a message without empty fields, with its content as one text.

    The assistant's missing content is empty, or None beside tool calls. An empty list is an empty text, as in vLLM.
    Raises TokenizerError for an unknown role, another's missing content, malformed tool calls, parts that are no
    text, or fields that the template does not write.
    """
    # OpenAI's clients send null, or an empty list, for a field that is not there.
    plain: Message = {
        name: value
        for name, value in message.items()
        if value is not None and (value != [] or name == "content")
    }
    for name in plain.keys() - {"role", "content", "tool_call_id"}:
        if not template.names(name):
            raise TokenizerError(
                f"messages[{number}].{name}: the model's chat template does not write it; leave it out, or write it into the content"
            )
    plain["role"] = _role(number, plain.get("role"), template)
    content = plain.get("content")
    if content is None and plain["role"] != "assistant":
        raise TokenizerError(
            f"messages[{number}].content: null or missing, which only the assistant's may be; give a text, which may be empty"
        )
    if "tool_calls" in plain:
        calls = plain["tool_calls"]
        if not isinstance(calls, list):
            raise TokenizerError(f"messages[{number}].tool_calls: a list")
        try:
            plain["tool_calls"] = [parsed_call(call) for call in calls]
        except ValueError as error:
            raise TokenizerError(f"messages[{number}].tool_calls: {error}") from error
    elif content is None:
        content = ""
    plain["content"] = None if content is None else _content(number, content)
    return plain


def _role(number: int, role: object, template: ChatTemplate) -> str:
    """Return a message's role; a developer's is the system's for templates that lack it.

    Raises TokenizerError for an unknown role, or a tool's if the template lacks it.
    """
    if role not in _ROLES:
        raise TokenizerError(f"messages[{number}].role = {role!r}: one of {', '.join(_ROLES)}")
    if role == "developer" and not template.names("developer"):
        return "system"  # OpenAI's newer name for it
    if role == "tool" and not template.names("tool"):
        raise TokenizerError(
            f"messages[{number}].role = 'tool': the model's chat template does not know it; write the result into a message of the user"
        )
    return str(role)


def _content(number: int, content: object) -> str:
    """Return a message's content as one text. Raises TokenizerError for parts of another type than text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise TokenizerError(f"messages[{number}].content: a text, or a list of parts of type text")
    texts = []
    for place, part in enumerate(content):
        kind, text = (part.get("type"), part.get("text")) if isinstance(part, Mapping) else (None, None)
        if kind != "text" or not isinstance(text, str):
            raise TokenizerError(
                f"messages[{number}].content[{place}] is of type {kind!r}: only parts of type text, with a text, are understood"
            )
        texts.append(text)
    return "".join(texts)


def stop_tokens(
    published: Path | None, tokenizer: Tokenizer, templates: Path | None = None
) -> frozenset[int]:
    """Return the ids that end a text: the tokenizer's end of document, and those in the ``published`` model's
    configuration.

    ``published`` None has none. With the folder of its ``templates``, also the end of a turn in the conversations
    that the run was trained on. Damaged files of a template are ignored. Raises HuggingFaceError for a damaged
    configuration.
    """
    stop = {tokenizer.end_of_document}
    # As in transformers: a model without a generation config stops where its configuration does.
    files = [] if published is None else [published / GENERATION_CONFIG, published / CONFIG]
    if file := next((file for file in files if file.is_file()), None):
        named = read_json(file).get("eos_token_id")
        stop |= {token for token in (named if isinstance(named, list) else [named]) if isinstance(token, int)}
    if templates is not None and templates != published:
        with suppress(ChatTemplateError):
            stop |= turn_ends(read_chat_template(templates), tokenizer)
    return frozenset(stop)


# The text side of a served model: tokenizer, chat template, end tokens, name.


@dataclass(frozen=True)
class ModelText:
    """Tokenizer, chat template, end tokens and name of a served model."""

    name: str
    tokenizer: Tokenizer
    stop_tokens: frozenset[int]
    vocab_size: int
    template: ChatTemplate | None = None
    texts: dict[int, str] = field(default_factory=dict, repr=False, compare=False)
    """Cache of the texts of decoded tokens."""

    @property
    def note(self) -> str:
        """Warning if the tokenizer has tokens that the model lacks; else empty."""
        if self.tokenizer.vocab_size <= self.vocab_size:
            return ""
        return (
            f"the tokenizer has {self.tokenizer.vocab_size} tokens and the model {self.vocab_size}: texts with one of those that the model does "
            "not have are refused; put the tokenizer that it was trained with into the run's folder tokenizer"
        )

    @property
    def special_tokens(self) -> dict[str, tuple[str, int]]:
        """Name and id of the ``eos_token``, which ends a document, and the ``bos_token`` if one begins it."""
        if not isinstance(self.tokenizer, PublishedTokenizer):
            return {"eos_token": (END_OF_DOCUMENT, self.tokenizer.end_of_document)}
        ids = {"eos_token": self.tokenizer.end_of_document}
        if self.tokenizer.document_start:
            ids["bos_token"] = self.tokenizer.document_start[0]
        return {field: (self.tokenizer.token_name(token), token) for field, token in ids.items()}

    def prompt_ids(self, prompt: str | list[int], room: LengthLimit, *, begin: bool = True) -> list[int]:
        """Return the ids of a prompt; ``begin`` adds the tokenizer's start tokens to a text, not to ids.

        Raises RefusedError for an empty list, a prompt that is too long or cannot be encoded, and for ids that the
        model lacks.
        """
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
        """Return ``ids``. Raises RefusedError for one outside the vocabulary."""
        for token_id in ids:
            if not 0 <= token_id < self.vocab_size:
                because = f"; {self.note}" if self.note else ""
                raise RefusedError(
                    f"{field_name}: token id {token_id} is outside the vocabulary of {self.vocab_size}{because}",
                    field_name,
                )
        return ids

    def chat_ids(self, body: Chat, room: LengthLimit) -> list[int]:
        """Return the ids of a conversation, up to the start of the answer, or to the end of a message that is
        continued.

        Raises RefusedError if there is no template, if fields contradict each other, if it refuses the messages, if
        they are too long, or if the model lacks an id.
        """
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
        assert isinstance(self.tokenizer, PublishedTokenizer), "others have no template"
        try:
            encoded = self.tokenizer.encode_template(text)
        except UnicodeError as error:
            raise RefusedError(f"messages: cannot be encoded: {error}", "messages") from error
        return self._require_known(encoded, "messages")


def read_model_text(run_dir: Path, name: str, vocab_size: int, chat_template: str = "") -> ModelText:
    """Load the text side of a run's model: tokenizer, stop tokens and chat template.

    ``chat_template`` is the file of a template to use instead of the run's own; empty keeps that. Its ends of turns
    become stop tokens too. Raises TokenizerError, also for a damaged file, and the errors of ``stop_tokens``. A damaged
    template of the run's own is left out.
    """
    tokenizer = load_run_tokenizer(run_dir)
    published = published_with(run_dir, tokenizer)
    templates = template_folder(run_dir, published)
    stop = stop_tokens(published, tokenizer, templates)
    template: ChatTemplate | None = None
    try:
        if chat_template:
            if not isinstance(tokenizer, PublishedTokenizer):
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
