"""Training on conversations: the loss is that of the assistant's words alone, on any number of ranks and from any place."""

from __future__ import annotations

import json
import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from parity.llama3_folder import save_llama3
from phalanx.checkpoint.interop.huggingface.convert import import_hf
from phalanx.data.chat.encode import ChatEncoder, ChatLayout
from phalanx.data.chat.messages import conversation_text
from phalanx.data.chat.template import read_chat_template
from phalanx.data.errors import DatasetError
from phalanx.data.formats.document import Document
from phalanx.data.preparing.prepare import prepare
from phalanx.data.preparing.split_writer import split_of
from phalanx.data.reading.dataset import RunData
from phalanx.data.reading.sources import open_places, read_data_index
from phalanx.data.stored.copies import copy_dataset
from phalanx.data.stored.index import HELD_OUT, TRAIN, read_index
from phalanx.data.tokenizers.tokenizer import tokenizer_from_file
from phalanx.run.directory.paths import RunDirectory, read_resolved
from phalanx.run.spec import DataSpec, RunSpec, SourceSpec
from phalanx.train.start.prepare import resolve
from ranks import Ranks
from store.servers import Server
from tiny_runs import on_layout, tiny_run, train_on_this_rank

SEQ_LEN = 160
HELD_OUT_FRACTION = 0.3


def conversations() -> list[Document]:
    """Conversations of one to three turns, named by their numbers."""
    documents = []
    for number in range(60):
        messages: list[dict[str, object]] = []
        for turn in range(1 + number % 3):
            total = (number * 7 + turn * 3) % 10
            messages += [
                {"role": "user", "content": f"cat {number % 9}"},
                {"role": "assistant", "content": f"dog {total}" * (1 + turn % 2)},
            ]
        documents.append(Document(f"chat-{number}", conversation_text({"messages": messages}, "messages")))
    return documents


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chats") / "llama3"
    save_llama3(folder)
    return folder


@pytest.fixture(scope="module")
def chats(published: Path) -> Path:
    """Conversations in records, by the model's tokenizer and template."""
    out = published.parent / "chats"
    layout = ChatLayout(read_chat_template(published))
    prepare(
        conversations(),
        out,
        tokenizer=published,
        held_out_fraction=HELD_OUT_FRACTION,
        packed_seq_len=SEQ_LEN,
        chat=layout,
    )
    return out


@pytest.fixture(scope="module")
def imported(published: Path) -> Path:
    run = published.parent / "imported"
    import_hf(published, run)
    return run


def fine_tuning(imported: Path, dataset: Path, run_dir: Path, *, lr: float = 1e-3) -> RunSpec:
    """A run on conversations that begins with the imported weights."""
    model = read_resolved(RunDirectory(imported)).model
    spec = tiny_run(dataset, run_dir, steps=3)
    spec = replace(
        spec,
        model=model,
        train=replace(
            spec.train,
            seq_len=SEQ_LEN,
            batch_size=8,
            slots=4,
            micro_batch_size=1,
            document_mask=True,
            targets_within_documents=False,
        ),
        optimizer=replace(spec.optimizer, lr=lr, weight_decay=0.0),
        evaluation=replace(spec.evaluation, sequences=0, final_sequences=0),
        checkpoint=replace(spec.checkpoint, init_from=str(imported)),
    )
    return resolve(spec, open_places(spec.data), Path("chats.toml"))


def trained(ranks: Ranks, count: int, spec: RunSpec) -> dict[str, Any]:
    result = ranks.run(count, train_on_this_rank, spec)[0]
    assert isinstance(result, dict)
    return result


def test_the_held_out_loss_is_that_of_transformers_on_each_conversation_alone(
    ranks: Ranks, chats: Path, published: Path, imported: Path, tmp_path: Path
) -> None:
    ours = trained(ranks, 1, fine_tuning(imported, chats, tmp_path / "run", lr=1e-12))
    theirs = AutoModelForCausalLM.from_pretrained(published, dtype=torch.float32)
    encoder = ChatEncoder(tokenizer_from_file(published), ChatLayout(read_chat_template(published)), SEQ_LEN)
    total, targets = 0.0, 0
    for document in conversations():
        if split_of(document.name, HELD_OUT_FRACTION) != HELD_OUT:
            continue
        encoded = encoder.encode(document.text)
        assert encoded is not None
        ids = torch.tensor(encoded.ids.astype("int64"))[None]
        with torch.no_grad():
            logits = theirs(ids).logits[0, :-1]
        losses = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
        learned = torch.tensor(encoded.learned[1:])
        total, targets = total + float(losses[learned].sum()), targets + int(learned.sum())
    assert read_index(chats).held_out.learned == targets
    assert ours["held_out_loss"] == pytest.approx(total / targets, rel=1e-5)


def test_any_number_of_ranks_gives_the_same_weights_and_counts_what_is_learned(
    ranks: Ranks, chats: Path, imported: Path, tmp_path: Path
) -> None:
    results = [
        trained(ranks, count, on_layout(fine_tuning(imported, chats, tmp_path / str(count)), sharding, 0))
        for count, sharding in ((1, "none"), (2, "zero3"))
    ]
    for figure in ("weights_sha256", "loss", "held_out_loss", "tokens"):
        assert len({result[figure] for result in results}) == 1
    index = read_index(chats)
    records = index.samples(TRAIN, SEQ_LEN)
    assert 0 < results[0]["tokens"] < 3 * 8 * SEQ_LEN
    assert results[0]["tokens"] == pytest.approx(3 * 8 / records * index.train.learned, rel=0.3)


def test_conversations_in_an_object_store_are_read_as_those_in_a_folder(
    chats: Path, imported: Path, tmp_path: Path, s3_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    url = s3_server.url(secrets.token_hex(8))
    copy_dataset(str(chats), url)
    local = fine_tuning(imported, chats, tmp_path / "run")
    remote = replace(local, data=DataSpec(path=url, cache=str(tmp_path / "cache")))
    local_data, remote_data = (RunData.of_run(spec) for spec in (local, remote))
    assert local_data.train_samples(0, 40).tolist() == remote_data.train_samples(0, 40).tolist()
    held_out = np.arange(local_data.held_out_len)
    assert local_data.held_out_targets(held_out).sum() == read_index(chats).held_out.learned
    assert local_data.held_out_targets(held_out).tolist() == remote_data.held_out_targets(held_out).tolist()


def test_conversations_are_mixed_with_packed_text(
    ranks: Ranks, chats: Path, published: Path, imported: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text"
    documents = [Document(f"t{number}", "the cat and the dog " * (1 + number % 5)) for number in range(60)]
    spec = fine_tuning(imported, chats, tmp_path / "run")
    data = DataSpec(
        sources=(
            SourceSpec("chats", str(chats), (1.0,), epochs=0),
            SourceSpec("text", str(text), (1.0,), epochs=0),
        )
    )
    # The template uses the tokenizer's own end token, so that conversations end with another one than text.
    prepare(documents, text, tokenizer=published, packed_seq_len=SEQ_LEN)
    with pytest.raises(DatasetError, match=r"conversations of source 'chats' end with token \d+"):
        read_data_index(data)
    ends = tmp_path / "ends"
    ends.mkdir()
    (ends / "tokenizer.json").write_bytes((published / "tokenizer.json").read_bytes())
    config = json.loads((published / "tokenizer_config.json").read_text())
    (ends / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "<|end_of_text|>"}))
    layout = ChatLayout(read_chat_template(published))
    for name, source, chat in (("text", documents, None), ("chats", conversations(), layout)):
        prepare(source, tmp_path / f"both-{name}", tokenizer=ends, packed_seq_len=SEQ_LEN, chat=chat)
    data = DataSpec(
        sources=tuple(
            SourceSpec(name, str(tmp_path / f"both-{name}"), (1.0,), epochs=0) for name in ("chats", "text")
        )
    )
    mixed = replace(spec, data=data, train=replace(spec.train, end_of_document=-1))
    mixed = resolve(mixed, open_places(data), Path("chats.toml"))
    results = [
        trained(ranks, count, replace(mixed, run_dir=str(tmp_path / f"mixed-{count}"))) for count in (1, 2)
    ]
    assert results[0]["weights_sha256"] == results[1]["weights_sha256"]
