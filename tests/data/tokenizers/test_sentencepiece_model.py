"""sentencepiece models: the ids are sentencepiece's and transformers', every text comes back, every byte is accounted for."""

import io
import json
import random
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as HfTokenizer
from transformers import PreTrainedTokenizerFast

from phalanx.data.chat.encode import ChatEncoder, ChatLayout
from phalanx.data.chat.messages import conversation_text
from phalanx.data.chat.template import ChatTemplate
from phalanx.data.errors import TokenizerError
from phalanx.data.formats.document import Document
from phalanx.data.preparing.prepare import prepare
from phalanx.data.preparing.split_writer import split_of
from phalanx.data.reading.dataset import RunData
from phalanx.data.stored.index import HELD_OUT
from phalanx.data.tokenizers.published import FallbackTokenizer
from phalanx.data.tokenizers.tokenizer import load_tokenizer, same_tokens, tokenizer_from_file
from phalanx_serve.http.detokenizer import IncrementalDetokenizer

WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "mats",
    "naïve",
    "日本語",
    "x = 12",
    "def f(x):",
    "    return",
    "aaaa",
    "    ",
]
LOSSLESS = {
    "model_type": "bpe",
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,
    "split_digits": True,
    "character_coverage": 0.99,
    "vocab_size": 320,
    "hard_vocab_limit": False,
    "minloglevel": 2,
}
TEXT = st.one_of(
    st.text(),
    st.lists(
        st.sampled_from(
            [*WORDS, "</s>", "<s>", "<0x0A>", "<t>", " ", "\n\n", "a", "\t", "\r\n", "\0", "👩‍🚀"]
        )
    ).map("".join),
)


def trained(**changes: object) -> bytes:
    """A small model, trained here as Llama 2's was, but for what is changed."""
    chance = random.Random(0)
    lines = (" ".join(chance.choices(WORDS, k=12)) for _ in range(400))
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines, model_writer=model, **{**LOSSLESS, **changes}
    )
    return model.getvalue()


def written(folder: Path, model: bytes, **config: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.model").write_bytes(model)
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


LLAMA = trained()
GEMMA = trained(add_dummy_prefix=False, user_defined_symbols=["<t>", "\n\n"], bos_id=2, eos_id=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sentencepiece")


@pytest.fixture(scope="module", params=[LLAMA, GEMMA], ids=["llama", "gemma"])
def pair(
    request: pytest.FixtureRequest, folder: Path
) -> tuple[FallbackTokenizer, sentencepiece.SentencePieceProcessor]:
    ours = tokenizer_from_file(written(folder, request.param) / "tokenizer.model")
    assert isinstance(ours, FallbackTokenizer)
    return ours, sentencepiece.SentencePieceProcessor(model_proto=request.param)


@given(text=TEXT)
def test_ids_are_sentencepieces(
    pair: tuple[FallbackTokenizer, sentencepiece.SentencePieceProcessor], text: str
) -> None:
    ours, theirs = pair
    # A "▁" in the text is the one thing that sentencepiece does not give back.
    text = text.replace("▁", "_")
    assert ours.encode(text) == theirs.encode(text)


@given(text=st.one_of(TEXT, st.text(st.sampled_from("▁ a\n"))))
def test_any_text_comes_back_and_its_bytes_are_those_of_its_tokens(
    pair: tuple[FallbackTokenizer, sentencepiece.SentencePieceProcessor], text: str
) -> None:
    ours, _ = pair
    ids = ours.encode(text)
    assert ours.decode(ids) == text
    prefix = ours.prefix_bytes if text else 0
    assert ours.byte_lengths[np.array(ids, dtype=np.int64)].sum() == len(text.encode()) + prefix


@given(texts=st.lists(st.one_of(TEXT, st.text(st.sampled_from("▁ a"))), max_size=5))
def test_a_batch_is_encoded_like_its_texts_one_by_one(
    pair: tuple[FallbackTokenizer, sentencepiece.SentencePieceProcessor], texts: list[str]
) -> None:
    ours, _ = pair
    assert [ids.tolist() for ids in ours.encode_batch(texts)] == [ours.encode(text) for text in texts]


@given(text=TEXT, cut=st.integers(0, 40))
def test_streamed_text_is_what_decoding_at_once_gives_after_a_prompt_and_from_the_start(
    pair: tuple[FallbackTokenizer, sentencepiece.SentencePieceProcessor], text: str, cut: int
) -> None:
    ours, _ = pair
    ids = ours.encode(text)
    for first, at_start in ((0, True), (min(cut, len(ids)), cut == 0)):
        stream = IncrementalDetokenizer(ours, at_start=at_start)
        shown = "".join([*map(stream.feed, ids[first:]), stream.flush()])
        assert shown == ours.decode(ids[first:], at_start=at_start)
    if (before := ours.decode(ids[: min(cut, len(ids))])) and "\ufffd" not in before:
        assert before + shown == text


def test_transformers_reads_what_is_saved_and_agrees(
    pair: tuple[FallbackTokenizer, sentencepiece.SentencePieceProcessor], tmp_path: Path
) -> None:
    ours, theirs = pair
    ours.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert (loaded, loaded.fingerprint) == (ours, ours.fingerprint)
    assert same_tokens(loaded, ours)
    read = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    text = "def f(x):\n\n    return  naïve 日本語 👩‍🚀<t>12  "
    assert read.encode(text, add_special_tokens=False) == ours.encode(text)
    assert read.encode(text) == [*ours.document_start, *ours.encode(text)]
    assert read.decode(ours.encode(text)) == text
    assert read.eos_token_id == ours.end_of_document == theirs.eos_id()
    assert ours.vocab_size == theirs.vocab_size()


@pytest.mark.parametrize(
    ("config", "start"), [({}, (1,)), ({"add_bos_token": True}, (1,)), ({"add_bos_token": False}, ())]
)
def test_texts_begin_with_the_first_token_if_the_model_requires_it(
    tmp_path: Path, config: dict[str, object], start: tuple[int, ...]
) -> None:
    assert tokenizer_from_file(written(tmp_path / "model", LLAMA, **config)).document_start == start


def test_the_end_token_of_the_configuration_comes_before_the_models(tmp_path: Path) -> None:
    model = trained(control_symbols=["<|end|>"])
    named = tokenizer_from_file(written(tmp_path / "a", model, eos_token={"content": "<|end|>"}))
    assert named.end_token == "<|end|>"
    assert tokenizer_from_file(written(tmp_path / "b", model)).end_token == "</s>"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "unigram"}, "is no BPE"),
        ({"byte_fallback": False}, "has no bytes to fall back to"),
        ({"normalization_rule_name": "nmt_nfkc"}, "normalizes text .nmt_nfkc"),
        ({"remove_extra_whitespaces": True}, "joins spaces"),
        ({"treat_whitespace_as_suffix": True}, "writes spaces in a way"),
    ],
)
def test_a_model_that_loses_text_is_refused_with_the_reason(
    tmp_path: Path, changes: dict[str, object], reason: str
) -> None:
    with pytest.raises(TokenizerError, match=f"tokenizer.model: the sentencepiece model {reason}"):
        tokenizer_from_file(written(tmp_path / "model", trained(**changes)))


@pytest.mark.parametrize("keep", [1, 10, 1000])
def test_a_damaged_model_is_refused(tmp_path: Path, keep: int) -> None:
    with pytest.raises(TokenizerError, match=r"copy it again|has no bytes|is no BPE"):
        tokenizer_from_file(written(tmp_path / "model", LLAMA[:keep]))


def as_published(tokenizer: FallbackTokenizer, form: str) -> str:
    """The same tokenizer in another of the forms in which ``tokenizer.json`` files of such models are published."""
    hf = HfTokenizer.from_str(tokenizer.serialized)
    assert isinstance(hf.model, models.BPE)
    spaces = normalizers.Replace(" ", "▁")
    if form == "prepended":  # Llama 2, Mistral 7B
        hf.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        hf.pre_tokenizer = None  # type: ignore[assignment]
    elif form == "split":  # Gemma
        hf.normalizer = spaces
        hf.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        hf.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return str(hf.to_str())


@pytest.mark.parametrize(("model", "form"), [(LLAMA, "prepended"), (GEMMA, "split")])
def test_published_forms_of_one_tokenizer_give_the_same_ids(tmp_path: Path, model: bytes, form: str) -> None:
    ours = tokenizer_from_file(written(tmp_path / "model", model))
    assert isinstance(ours, FallbackTokenizer)
    (tmp_path / "tokenizer.json").write_text(as_published(ours, form))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": ours.end_token}))
    published = tokenizer_from_file(tmp_path)
    theirs = HfTokenizer.from_str(as_published(ours, form))
    for text in ("", "a", " a", "def f(x):\n    return  naïve 👩‍🚀 12", "the cats  sat"):
        assert (
            published.encode(text) == ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids
        )
        assert published.decode(published.encode(text)) == text


def test_a_tokenizer_json_that_normalizes_is_refused(tmp_path: Path) -> None:
    ours = tokenizer_from_file(written(tmp_path / "model", GEMMA))
    hf = HfTokenizer.from_str(ours.serialized)
    hf.normalizer = normalizers.Lowercase()
    (tmp_path / "tokenizer.json").write_text(hf.to_str())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": ours.end_token}))
    with pytest.raises(TokenizerError, match="must not normalize"):
        tokenizer_from_file(tmp_path)


@pytest.mark.parametrize("config", [{}, {"add_bos_token": False}])
def test_bytes_of_held_out_text_are_those_of_the_documents(tmp_path: Path, config: dict[str, object]) -> None:
    source = written(tmp_path / "model", LLAMA, **config)
    documents = [Document(f"d{n}", f"the cats {n} ▁ sat\n" * (n % 5 + 1)) for n in range(60)]
    prepare(documents, tmp_path / "set", tokenizer=source / "tokenizer.model", held_out_fraction=0.3)
    data = RunData.open(tmp_path / "set", 1, seed=0)
    texts = [document.text for document in documents if split_of(document.name, 0.3) == HELD_OUT]
    first = data.tokenizer.byte_lengths[data.held_out_samples(0, 1)[0, 0]]
    missing = first - data.tokenizer.prefix_bytes if first else 0
    counted = data.held_out_bytes(np.arange(data.held_out_len)).sum()
    assert counted + missing == sum(len(text.encode()) for text in texts)


@pytest.mark.parametrize("model", [LLAMA, GEMMA], ids=["llama", "gemma"])
def test_a_conversation_has_the_ids_of_transformers_and_the_answer_is_what_is_learned(
    tmp_path: Path, model: bytes
) -> None:
    ours = tokenizer_from_file(written(tmp_path, model))
    assert isinstance(ours, FallbackTokenizer)
    source = "{{ bos_token }}{% for m in messages %}{{ '[INST] ' + m.content + ' [/INST]' if m.role == 'user' else m.content + eos_token }}{% endfor %}"
    hf = HfTokenizer.from_str(ours.serialized)
    hf.encode_special_tokens = False
    theirs = PreTrainedTokenizerFast(tokenizer_object=hf, bos_token="<s>", eos_token="</s>")
    chat = [
        {"role": "user", "content": " naïve  👩‍🚀\n"},
        {"role": "assistant", "content": "日本語\n  def f(x):\n\treturn  x\n"},
    ]
    expected = theirs.apply_chat_template(chat, chat_template=source, tokenize=True, return_dict=True)
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    conversation = ChatEncoder(ours, ChatLayout(template), 500).encode(
        conversation_text({"messages": chat}, "messages")
    )
    assert conversation is not None
    assert conversation.ids[:-1].tolist() == expected["input_ids"]
    learned = hf.decode(conversation.ids[conversation.learned].tolist(), skip_special_tokens=False)
    assert learned == chat[1]["content"] + "</s>"


@pytest.mark.parametrize("flags", [{"rstrip": True}, {"lstrip": True}, {"single_word": True}], ids=str)
def test_an_added_token_with_any_flags_changes_no_text_beside_it(
    flags: dict[str, bool], tmp_path: Path
) -> None:
    loaded = tokenizer_from_file(written(tmp_path, trained()))
    hf = HfTokenizer.from_str(loaded.serialized)
    hf.add_tokens([AddedToken("<note>", **flags)])
    tokenizer = FallbackTokenizer(hf.to_str(), loaded.end_token)
    text = "the <note>  cat<note>\n sat <note> "
    ids = tokenizer.encode(text)
    assert loaded.vocab_size in ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.byte_lengths[ids].sum() == len(text.encode()) + tokenizer.prefix_bytes
