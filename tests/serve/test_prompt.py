"""Prompts, chat messages and end tokens: the ids that ``transformers`` gives a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from parity.llama3_folder import CHAT_TEMPLATE, TEXT, save_llama3
from phalanx.checkpoint.interop.huggingface.convert import import_hf
from phalanx.checkpoint.interop.huggingface.stored_folder import stand_in
from phalanx.data.chat.template import ChatTemplateError, read_chat_template
from phalanx.data.errors import TokenizerError
from phalanx.data.tokenizers.tokenizer import BytesTokenizer, tokenizer_from_file, train_bpe
from phalanx.run.directory.paths import RunDirectory
from phalanx_serve import prompt as prompt_module
from phalanx_serve.generate import continued, generate, load_model
from phalanx_serve.prompt import (
    Framing,
    encode_chat,
    encode_messages,
    encode_prompt,
    frame_messages,
    load_run_tokenizer,
    published_with,
    read_model_text,
    stop_tokens,
    template_folder,
)

LONGER_TEMPLATE = """{%- set ns = namespace(count=0) %}
{%- if tools is not none %}{{ raise_exception('no tools') }}{% endif %}
{{ bos_token }}{% for message in messages %}
  {% set ns.count = ns.count + 1 %}
  {% if message.role == 'system' %}{% continue %}{% endif %}
  {% generation %}[{{ message.role }}]{% endgeneration %} {{ message | tojson(indent=2) }}
  {{ dict(a=1).a }} {{ message.content.split('cat') | length }} {{ pad_token is defined }}<|eot_id|>
{% endfor %}
{{ ns.count }} {{ eos_token }}{% if add_generation_prompt %}<|start_header_id|>assistant{% endif %}"""
TEMPLATES = {"as Llama 3's": CHAT_TEMPLATE, "all that a template may use": LONGER_TEMPLATE}
MESSAGES = [*TEXT, "", "  <|eot_id|> spelled {{ bos_token }} ", "a\n\nb & <c>"]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prompts") / "llama3"
    save_llama3(folder)
    return folder


@pytest.fixture(scope="module")
def run(published: Path) -> Path:
    run = published.parent / "run"
    import_hf(published, run)
    return run


@pytest.fixture
def bare_run(published: Path, tmp_path: Path) -> RunDirectory:
    """The tokenizer and the publisher's files of a run, to be changed."""
    run = RunDirectory(tmp_path / "run")
    for folder in (run.tokenizer, run.published):
        folder.mkdir(parents=True)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name).write_bytes((published / name).read_bytes())
    return run


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("text", [*MESSAGES, "the cat"])
def test_a_prompt_has_the_ids_of_transformers(text: str, run: Path, published: Path) -> None:
    # Text never spells a special token here; transformers splits such text alike when it is asked to.
    theirs = AutoTokenizer.from_pretrained(published)
    expected = theirs(text, split_special_tokens=True)["input_ids"]
    assert encode_prompt(load_run_tokenizer(run), text) == expected


def test_the_likeliest_text_is_that_of_transformers(run: Path, published: Path) -> None:
    ids = AutoTokenizer.from_pretrained(published)(TEXT[0], return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(published, dtype=torch.float32)
    theirs = model.generate(ids, max_new_tokens=20, do_sample=False, temperature=None, top_p=None)
    tokenizer = load_run_tokenizer(run)
    prompt, stop = encode_prompt(tokenizer, TEXT[0]), stop_tokens(published_with(run, tokenizer), tokenizer)
    ours = list(generate(load_model(run)[0], prompt, tokens=20, temperature=0, stop=stop))
    assert ours == [token for token in theirs[0, ids.shape[1] :].tolist() if token not in stop]


def test_an_empty_prompt_begins_a_document(run: Path, published: Path) -> None:
    tokenizer = BytesTokenizer()
    assert encode_prompt(tokenizer, "") == [tokenizer.end_of_document]
    assert encode_prompt(tokenizer, "ab") == [97, 98]
    assert encode_prompt(load_run_tokenizer(run), "") == [
        AutoTokenizer.from_pretrained(published).bos_token_id
    ]


def test_a_text_ends_at_every_end_token_that_the_publisher_names(run: Path, published: Path) -> None:
    named = json.loads((published / "generation_config.json").read_text())["eos_token_id"]
    tokenizer = load_run_tokenizer(run)
    assert len(named) == 2
    assert stop_tokens(published_with(run, tokenizer), tokenizer) == {*named}
    assert stop_tokens(published_with(run, BytesTokenizer()), BytesTokenizer()) == {
        BytesTokenizer().end_of_document
    }
    assert stop_tokens(published_with(run / "nowhere", tokenizer), tokenizer) == {tokenizer.end_of_document}


def test_without_a_generation_config_a_text_ends_at_the_tokens_of_the_configuration(
    bare_run: RunDirectory,
) -> None:
    tokenizer = tokenizer_from_file(bare_run.tokenizer)
    ends = {tokenizer.end_of_document, tokenizer.end_of_document - 1}
    (bare_run.published / "config.json").write_text(json.dumps({"eos_token_id": sorted(ends)}))
    assert stop_tokens(bare_run.published, tokenizer) == ends


# Chat


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES.keys())
@pytest.mark.parametrize("place", ["its own file", "the tokenizer's configuration", "one of several"])
def test_a_message_has_the_ids_of_transformers_chat_template(
    template: str, place: str, bare_run: RunDirectory
) -> None:
    if place == "its own file":
        (bare_run.published / "chat_template.jinja").write_text(template)
        edit(bare_run.published / "tokenizer_config.json", chat_template="{{ wrong }}")
    else:
        several = [{"name": "default", "template": template}, {"name": "rag", "template": "{{ wrong }}"}]
        several = several if place == "one of several" else template  # type: ignore[assignment]
        edit(bare_run.published / "tokenizer_config.json", chat_template=several)
    theirs = AutoTokenizer.from_pretrained(bare_run.published)
    tokenizer = tokenizer_from_file(bare_run.tokenizer)
    for message in MESSAGES:
        chat = [{"role": "user", "content": message}]
        expected = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert encode_chat(bare_run.published, tokenizer, message) == expected, message


def test_special_tokens_that_an_older_folder_names_in_a_file_of_their_own_are_found(
    bare_run: RunDirectory,
) -> None:
    (bare_run.published / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": {"content": "<|start_header_id|>"}, "eos_token": "<|eot_id|>"})
    )
    (bare_run.published / "chat_template.jinja").write_text("{{ bos_token }}{{ eos_token }}{{ unk_token }}x")
    theirs = AutoTokenizer.from_pretrained(bare_run.published)
    expected = theirs.apply_chat_template([{"role": "user", "content": ""}], return_dict=False)
    assert encode_chat(bare_run.published, tokenizer_from_file(bare_run.tokenizer), "") == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "published without a chat template"),
        ("{{ raise_exception('users must not ask') }}", "users must not ask"),
        ("{% for %}", "cannot frame the message"),
        ("{{ messages[0].content.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{% set n = namespace(x=1) %}{% set n.__class__ = 3 %}", "may not set '__class__'"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ 1 // 0 }}", "by zero"),
    ],
)
def test_a_chat_that_cannot_be_framed_is_refused_with_the_reason(
    template: str | None, message: str, bare_run: RunDirectory
) -> None:
    if template is not None:
        (bare_run.published / "chat_template.jinja").write_text(template)
    with pytest.raises(TokenizerError, match=message):
        encode_chat(bare_run.published, tokenizer_from_file(bare_run.tokenizer), "hello")


def test_a_conversation_has_the_ids_of_transformers(bare_run: RunDirectory) -> None:
    (bare_run.published / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    theirs = AutoTokenizer.from_pretrained(bare_run.published)
    chat = [
        {"role": role, "content": text}
        for role, text in zip(["system", "user", "assistant", "user"], MESSAGES, strict=False)
    ]
    expected = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    tokenizer = tokenizer_from_file(bare_run.tokenizer)
    assert encode_messages(read_chat_template(bare_run.published), tokenizer, chat) == expected
    parts = [
        {
            **m,
            "content": [
                {"type": "text", "text": m["content"][:2]},
                {"type": "text", "text": m["content"][2:]},
            ],
        }
        for m in chat
    ]
    assert encode_messages(read_chat_template(bare_run.published), tokenizer, parts) == expected


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "there is none"),
        (
            [{"role": "wizard", "content": "a"}],
            r"messages\[0\].role = 'wizard': one of system, developer, user",
        ),
        (
            [{"role": "user", "content": None}],
            r"messages\[0\].content: null or missing, which only the assistant's",
        ),
        ([{"role": "system"}], r"messages\[0\].content: null or missing"),
        ([{"role": "user", "content": 0}], r"messages\[0\].content: a text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"content\[0\] is of type 'image_url'"),
    ],
)
def test_a_message_that_is_not_understood_is_refused_by_its_field(
    messages: list[dict[str, object]], message: str, bare_run: RunDirectory
) -> None:
    (bare_run.published / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    with pytest.raises(TokenizerError, match=message):
        encode_messages(
            read_chat_template(bare_run.published), tokenizer_from_file(bare_run.tokenizer), messages
        )


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for a in range(99999) %}{{ 'abcdefgh' * 500 }}{% endfor %}", "more than .* characters"),
        ("{{ 'a' * 99999999999 }}", "bytes of memory"),
        ("{{ 'a'|center(99999999999) }}", "bytes of memory"),
        ("{{ '%9999999999d'|format(1) }}", "bytes of memory"),
        (
            "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
            "bytes of memory",
        ),
        # One call of the interpreter, which no Python can interrupt: a list that holds itself twice, sixty times over.
        (
            "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x == ns.x|list }}{{ ns.x }}",
            "does not end within|bytes of memory",
        ),
        ("{{ 9 ** (9 ** 9) }}", "does not end within"),
    ],
)
def test_a_hostile_template_is_ended_and_the_next_conversation_is_framed(
    template: str, message: str, bare_run: RunDirectory
) -> None:
    tokenizer = tokenizer_from_file(bare_run.tokenizer)
    (bare_run.published / "chat_template.jinja").write_text(template)
    with pytest.raises(TokenizerError, match=message):
        encode_chat(bare_run.published, tokenizer, "hello")
    hostile = read_chat_template(bare_run.published)
    with pytest.raises(ChatTemplateError, match=message):
        hostile.render_marked([{"role": "user", "content": "hello"}])
    (bare_run.published / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert encode_chat(bare_run.published, tokenizer, "hello") == tokenizer.encode("hello")


# What a conversation has beside roles and contents


TOOLS: list[object] = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
AGENT = """{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|start_header_id|>{{ m.role }}{% if m.tool_calls %}\
{{ m.tool_calls | tojson }}{% endif %}{% if m.role == 'tool' %}({{ m.name }}){% endif %}{{ m.content or '' }}<|eot_id|>{% endfor %}\
{% if add_generation_prompt %}{% if enable_thinking is defined and not enable_thinking %}<none>{% endif %}{% endif %}"""


def test_tools_calls_results_and_variables_are_framed_as_transformers_frames_them(
    bare_run: RunDirectory,
) -> None:
    (bare_run.published / "chat_template.jinja").write_text(AGENT)
    theirs = AutoTokenizer.from_pretrained(bare_run.published)
    tokenizer, template = tokenizer_from_file(bare_run.tokenizer), read_chat_template(bare_run.published)
    chat = [
        {"role": "user", "content": "the cat"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "3", "name": "add", "tool_call_id": "c1"},
    ]
    expected = theirs.apply_chat_template(
        chat, tools=TOOLS, add_generation_prompt=True, tokenize=False, enable_thinking=False
    )
    framing = Framing(tools=TOOLS, variables={"enable_thinking": False})
    as_sent = [dict(message) for message in chat]
    sent = {"name": "add", "arguments": json.dumps({"a": 1})}
    as_sent[1] = chat[1] | {
        "tool_calls": [CALL | {"function": sent}],
        "refusal": None,
        "annotations": [],
    }
    assert frame_messages(template, tokenizer, as_sent, framing) == expected
    assert "<none>" in expected


@pytest.mark.parametrize("more", [{}, {"tool_calls": [CALL]}])
def test_an_assistants_content_of_null_is_an_empty_text_as_in_vllm(
    more: dict[str, object], bare_run: RunDirectory
) -> None:
    (bare_run.published / "chat_template.jinja").write_text(
        CHAT_TEMPLATE + "{% for m in messages %}{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}"
    )
    tokenizer, template = tokenizer_from_file(bare_run.tokenizer), read_chat_template(bare_run.published)
    question = {"role": "user", "content": "the cat"}
    null, no_parts, empty = (
        frame_messages(template, tokenizer, [question, {"role": "assistant", "content": content, **more}])
        for content in (None, [], "")
    )
    assert null == no_parts == empty


def test_arguments_of_null_are_an_empty_object_as_in_vllm(bare_run: RunDirectory) -> None:
    (bare_run.published / "chat_template.jinja").write_text(AGENT)
    tokenizer, template = tokenizer_from_file(bare_run.tokenizer), read_chat_template(bare_run.published)
    null, empty = (
        frame_messages(
            template,
            tokenizer,
            [{"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": arguments}}]}],
        )
        for arguments in (None, {})
    )
    assert null == empty


@pytest.mark.parametrize("content", ["and the", "and the  ", " "])
@pytest.mark.parametrize("template", [CHAT_TEMPLATE, CHAT_TEMPLATE.replace(" | trim", "")])
def test_a_message_is_continued_where_transformers_continues_it(
    content: str, template: str, bare_run: RunDirectory
) -> None:
    (bare_run.published / "chat_template.jinja").write_text(template)
    theirs = AutoTokenizer.from_pretrained(bare_run.published)
    chat = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": content}]
    expected = theirs.apply_chat_template(chat, continue_final_message=True, tokenize=False)
    tokenizer, own = tokenizer_from_file(bare_run.tokenizer), read_chat_template(bare_run.published)
    assert frame_messages(own, tokenizer, chat, Framing(answer=False, continued=True)) == expected


def test_a_developer_is_the_system_where_the_template_knows_none(bare_run: RunDirectory) -> None:
    (bare_run.published / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    tokenizer, template = tokenizer_from_file(bare_run.tokenizer), read_chat_template(bare_run.published)
    system, developer = (
        frame_messages(template, tokenizer, [{"role": role, "content": "be short"}])
        for role in ("system", "developer")
    )
    assert system == developer


@pytest.mark.parametrize(
    ("message", "framing", "field"),
    [
        ({"name": "bob"}, Framing(), r"messages\[0\].name"),
        ({"tool_calls": [CALL]}, Framing(), r"messages\[0\].tool_calls"),
        ({"mood": "calm"}, Framing(), r"messages\[0\].mood"),
        ({"role": "tool"}, Framing(), r"messages\[0\].role = 'tool'"),
        ({}, Framing(tools=TOOLS), "^tools: "),
        ({}, Framing(variables={"enable_thinking": False}), "^chat_template_kwargs: "),
        ({}, Framing(variables={"messages": []}), "^chat_template_kwargs: "),
        (
            {},
            Framing(variables={"add_generation_prompt": False}),
            "add_generation_prompt is a field of the request",
        ),
    ],
)
def test_what_the_template_would_leave_out_is_refused_by_its_field(
    message: dict[str, object], framing: Framing, field: str, bare_run: RunDirectory
) -> None:
    (bare_run.published / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    tokenizer, template = tokenizer_from_file(bare_run.tokenizer), read_chat_template(bare_run.published)
    with pytest.raises(TokenizerError, match=field):
        frame_messages(template, tokenizer, [{"role": "user", "content": "a", **message}], framing)


def test_a_run_with_another_tokenizer_than_the_published_one_has_no_chat_template(run: Path) -> None:
    for tokenizer in (BytesTokenizer(), train_bpe(TEXT, vocab_size=300)):
        with pytest.raises(TokenizerError, match=r"there is no chat template for this run.*leave out --chat"):
            encode_chat(published_with(run, tokenizer), tokenizer, "hello")


# A run's tokenizer


def test_the_runs_own_copy_of_the_tokenizer_comes_before_that_of_the_dataset(tmp_path: Path) -> None:
    data, run = tmp_path / "data", tmp_path / "run"
    for folder in (data, run):
        folder.mkdir()
    BytesTokenizer().save(data)
    (run / "run.toml").write_text(tomli_w.dumps({"data": {"path": str(data)}}))
    (run / "record.json").write_text('{"attempts": 1}')
    assert load_run_tokenizer(run).kind == "bytes"
    (run / "tokenizer").mkdir()
    train_bpe(["a b c"], vocab_size=257).save(run / "tokenizer")
    assert load_run_tokenizer(run).kind == "bpe"


def test_a_run_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(tomli_w.dumps({"data": {"path": str(tmp_path / "gone")}}))
    with pytest.raises(TokenizerError, match=r"has no tokenizer .*put .*tokenizer\.json into .*/tokenizer"):
        load_run_tokenizer(tmp_path)


def test_a_published_model_without_a_tokenizer_or_a_template_is_named_and_not_what_stands_in_for_it(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "llama3"
    save_llama3(folder)
    (folder / "chat_template.jinja").unlink()
    with stand_in(folder) as found:
        tokenizer = load_run_tokenizer(found.path)
        templates = template_folder(found.path, published_with(found.path, tokenizer))
        with pytest.raises(TokenizerError, match=rf"of {folder}\); leave out --chat"):
            encode_chat(templates, tokenizer, "hello")
    (folder / "tokenizer.json").unlink()
    with (
        stand_in(folder) as found,
        pytest.raises(TokenizerError, match=rf"^{folder} has no tokenizer .*tokenizer\.json"),
    ):
        load_run_tokenizer(found.path)


def test_an_imported_model_never_borrows_the_tokenizer_of_the_default_dataset(tmp_path: Path) -> None:
    data, imported = tmp_path / "data", tmp_path / "imported"
    for folder in (data, imported):
        folder.mkdir()
    BytesTokenizer().save(data)
    (imported / "run.toml").write_text(tomli_w.dumps({"data": {"path": str(data)}}))
    with pytest.raises(TokenizerError, match=r"has no tokenizer .*put .*tokenizer\.json into"):
        load_run_tokenizer(imported)


def test_the_published_tokenizer_is_loaded_once_for_a_text(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = []
    compared = prompt_module.keeps_tokenizer
    monkeypatch.setattr(
        prompt_module, "keeps_tokenizer", lambda *args: loaded.append(args) or compared(*args)
    )
    list(continued(run, TEXT[0], tokens=1, temperature=0, chat=True))
    assert len(loaded) == 1


def test_a_chat_template_for_a_tokenizer_of_bytes_is_refused_when_serving_starts(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.tokenizer.mkdir()
    BytesTokenizer().save(run.tokenizer)
    template = tmp_path / "mine.jinja"
    template.write_text(CHAT_TEMPLATE)
    with pytest.raises(TokenizerError, match=r"--chat-template .*mine\.jinja: .*bytes"):
        read_model_text(run.path, "run", 257, str(template))


def test_a_chat_template_that_is_no_jinja_is_refused_with_its_line_when_serving_starts(
    bare_run: RunDirectory,
) -> None:
    template = bare_run.path / "mine.jinja"
    template.write_text("{% for message in messages %}\n{{ message.content }")
    with pytest.raises(TokenizerError, match=r"--chat-template .*mine\.jinja: line 2"):
        read_model_text(bare_run.path, "run", 512, str(template))
    template.write_bytes(b"\xff")
    with pytest.raises(TokenizerError, match=r"the chat template .*mine\.jinja cannot be read"):
        read_model_text(bare_run.path, "run", 512, str(template))
