"""A chat template beside its tokenizer: with the dataset that it framed, the run, and the run's export."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from parity.llama3_folder import CHAT_TEMPLATE, save_llama3
from phalanx.checkpoint.interop.huggingface.convert import export_hf, import_hf
from phalanx.checkpoint.interop.huggingface.folders import GENERATION_CONFIG, read_json, write_json
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.data.chat.encode import ChatLayout, save_template, saved_template, turn_ends
from phalanx.data.chat.messages import conversation_text
from phalanx.data.chat.renderer import Renderer
from phalanx.data.chat.template import ChatTemplate, read_chat_template
from phalanx.data.errors import TokenizerError
from phalanx.data.formats.document import Document
from phalanx.data.preparing.prepare import prepare
from phalanx.data.reading.sources import open_places, template_folder
from phalanx.data.stored.copies import copy_dataset
from phalanx.data.tokenizers.tokenizer import tokenizer_from_file
from phalanx.run.directory.paths import RunDirectory, read_resolved
from phalanx.train.start.open_run import open_run
from phalanx_serve.prompt import encode_chat, published_with, read_model_text
from phalanx_serve.prompt import template_folder as folder_of_run
from tiny_runs import tiny_run

OWN = CHAT_TEMPLATE.replace("<|end_header_id|>\n\n", "<|end_header_id|>:")
"""Another template than the published one, as a base model's is, or one that is given."""


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kept") / "llama3"
    save_llama3(folder)
    return folder


def test_a_template_comes_back_with_its_special_tokens_and_is_written_once(
    published: Path, tmp_path: Path
) -> None:
    template = read_chat_template(published)
    tokenizer_from_file(published).save(tmp_path)
    assert saved_template(tmp_path) is None
    save_template(tmp_path, template)
    assert saved_template(tmp_path) == template
    before = {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    save_template(tmp_path, template)
    assert {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("source", "ends"),
    [
        (CHAT_TEMPLATE, ["<|eot_id|>"]),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", []),
        ("{{ raise_exception('no') }}", []),
    ],
)
def test_what_ends_a_turn_is_the_special_token_behind_an_answer(
    published: Path, source: str, ends: list[str]
) -> None:
    template = replace(read_chat_template(published), source=source)
    tokenizer = tokenizer_from_file(published)
    theirs = AutoTokenizer.from_pretrained(published)
    assert turn_ends(template, tokenizer) == set(theirs.convert_tokens_to_ids(ends))


def test_training_keeps_the_template_of_its_conversations_and_so_does_a_run_that_begins_from_it(
    published: Path, tmp_path: Path
) -> None:
    template = ChatTemplate(OWN, read_chat_template(published).special_tokens)
    turns = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "and the dog"}]
    documents = [Document(f"{n}", conversation_text({"messages": turns}, "messages")) for n in range(40)]
    chats, text = tmp_path / "chats", tmp_path / "text"
    prepare(
        documents,
        chats,
        tokenizer=published,
        held_out_fraction=0.3,
        packed_seq_len=64,
        chat=ChatLayout(template),
    )
    prepare(
        [Document(f"{n}", "the cat and the dog " * 20) for n in range(40)],
        text,
        tokenizer=published,
        held_out_fraction=0.3,
    )
    copy_dataset(str(chats), str(tmp_path / "copy"))
    assert saved_template(tmp_path / "copy") == template

    spec = tiny_run(text, tmp_path / "run")
    places = {"text": next(iter(open_places(spec.data).values()))}
    places["chats"] = next(iter(open_places(replace(spec.data, path=str(tmp_path / "copy"))).values()))
    first = open_run(spec, "data", text, template_folder=template_folder(places))
    assert saved_template(first.directory.tokenizer) == template

    start = first.directory.checkpoints / "step-00000002"
    later = replace(
        spec, run_dir=str(tmp_path / "later"), checkpoint=replace(spec.checkpoint, init_from=str(start))
    )
    second = open_run(later, "data", text)
    assert saved_template(second.directory.tokenizer) == template


def test_chats_are_served_and_exported_in_the_template_that_was_trained_and_not_in_the_published_one(
    published: Path, tmp_path: Path
) -> None:
    import_hf(published, tmp_path / "run")
    run = RunDirectory(tmp_path / "run")
    own = ChatTemplate(OWN, read_chat_template(published).special_tokens)
    save_template(run.tokenizer, own)
    tokenizer = tokenizer_from_file(run.tokenizer)
    spec = read_resolved(run).model
    words = read_model_text(run.path, "run", spec.vocab_size)
    assert words.template == own
    (turn_end,) = turn_ends(own, tokenizer)
    assert turn_end in words.stop_tokens

    tier = DiskTier(run.checkpoints)
    for published_dir, name in ((run.published, "with"), (None, "without")):
        export_hf(
            tier,
            0,
            spec,
            tmp_path / name,
            "float32",
            run.tokenizer,
            published_dir=published_dir,
            max_seq_len=64,
        )
        theirs = AutoTokenizer.from_pretrained(tmp_path / name)
        chat = [{"role": "user", "content": "the cat"}]
        expected = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert theirs.decode(expected).endswith("assistant<|end_header_id|>:")
        folder = folder_of_run(run.path, published_with(run.path, tokenizer))
        assert encode_chat(folder, tokenizer, "the cat") == expected
        named = read_json(tmp_path / name / GENERATION_CONFIG)["eos_token_id"]
        assert turn_end in (named if isinstance(named, list) else [named])


@pytest.mark.parametrize("generation", [{"eos_token_id": 1, "temperature": 0.6}, None])
def test_an_export_ends_turns_where_the_publisher_named_no_more_than_the_end_of_a_document(
    published: Path, tmp_path: Path, generation: dict[str, object] | None
) -> None:
    import_hf(published, tmp_path / "run")
    run = RunDirectory(tmp_path / "run")
    (run.published / GENERATION_CONFIG).unlink()
    if generation is not None:
        write_json(run.published / GENERATION_CONFIG, generation)
    config = read_json(run.published / "config.json")
    write_json(run.published / "config.json", config | {"eos_token_id": 1})
    save_template(run.tokenizer, ChatTemplate(OWN, read_chat_template(published).special_tokens))
    spec, tier = read_resolved(run).model, DiskTier(run.checkpoints)
    export_hf(tier, 0, spec, tmp_path / "hf", tokenizer_dir=run.tokenizer, published_dir=run.published)
    (turn_end,) = turn_ends(read_chat_template(run.tokenizer), tokenizer_from_file(run.tokenizer))
    written = read_json(tmp_path / "hf" / GENERATION_CONFIG)
    assert written["eos_token_id"] == [1, turn_end]
    assert written.get("temperature") == (generation or {}).get("temperature")


def test_a_served_model_has_the_chat_template_that_is_given_and_stops_where_it_ends_turns(
    published: Path, tmp_path: Path
) -> None:
    import_hf(published, tmp_path / "run")
    file = tmp_path / "other.jinja"
    file.write_text(CHAT_TEMPLATE.replace("<|eot_id|>", "<|end_header_id|>"))
    run = RunDirectory(tmp_path / "run")
    words = read_model_text(run.path, "run", read_resolved(run).model.vocab_size, str(file))
    assert words.template is not None
    assert words.template.source == file.read_text()
    assert tokenizer_from_file(published).encode_template("<|end_header_id|>")[0] in words.stop_tokens
    with pytest.raises(TokenizerError, match="nowhere"):
        read_model_text(run.path, "run", 1, str(tmp_path / "nowhere"))


def test_the_process_that_renders_imports_nothing_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jinja2.py").write_text("raise RuntimeError('of the working directory')")
    monkeypatch.chdir(tmp_path)
    assert Renderer().render("{{ a }}", {"a": 1}, today=False) == "1"
