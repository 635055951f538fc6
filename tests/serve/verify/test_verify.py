"""Exported folders against real transformers: what agrees, what is a tie, and what was exported wrongly."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from parity.llama3_folder import save_llama3
from phalanx.checkpoint.interop.huggingface.convert import import_hf
from phalanx.cli.weights import export_command as command
from phalanx.data.chat.encode import ChatEncoder, ChatLayout
from phalanx.data.chat.messages import conversation_text
from phalanx.data.chat.template import read_chat_template
from phalanx.data.formats.document import Document
from phalanx.data.preparing.prepare import prepare
from phalanx.data.tokenizers.tokenizer import tokenizer_from_file
from phalanx.train.start.open_run import open_run
from phalanx_serve import verify
from phalanx_serve.generate import generate, load_model
from phalanx_serve.other_engine import by_transformers
from phalanx_serve.verify import TIE_NATS, VerifyError, held_out_prompts, judged, other_texts
from tiny_runs import tiny_run

PROMPTS = [[5, 6, 7], [200, 11], [17] * 9]
SEQ_LEN = 64
TIE = TIE_NATS["float32"]


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A published folder, and the run that it became."""
    folder = tmp_path_factory.mktemp("verify")
    save_llama3(folder / "llama3")
    import_hf(folder / "llama3", folder / "run")
    return folder / "llama3", folder / "run"


def test_texts_of_transformers_are_ours_and_a_changed_weight_is_seen_at_the_first_token_that_differs(
    imported: tuple[Path, Path], tmp_path: Path
) -> None:
    published, run = imported
    model, _ = load_model(run)
    texts = by_transformers(str(published), "float32", PROMPTS, 12)["texts"]
    assert all(one.agrees(TIE) for one in judged(model, PROMPTS, texts))

    wrong = tmp_path / "wrong"
    shutil.copytree(published, wrong)
    weights = load_file(wrong / "model.safetensors")
    name = next(name for name in weights if name.endswith("q_proj.weight"))
    weights[name] = -weights[name]
    save_file(weights, wrong / "model.safetensors", {"format": "pt"})
    others = by_transformers(str(wrong), "float32", PROMPTS, 12)["texts"]
    found = judged(model, PROMPTS, others)
    assert not all(one.agrees(TIE) for one in found)
    for one, prompt, text in zip(found, PROMPTS, others, strict=True):
        ours = list(generate(model, prompt, tokens=12, temperature=0))
        first = next(
            (place for place, pair in enumerate(zip(ours, text, strict=False)) if len(set(pair)) > 1), None
        )
        assert one.differs_at == first
        if first is not None:
            assert (one.ours, one.theirs) == (ours[first], text[first])


def test_a_difference_that_rounding_explains_is_a_tie(imported: tuple[Path, Path]) -> None:
    model, _ = load_model(imported[1])
    readout = model(torch.tensor([PROMPTS[0]]))[0, -1].log_softmax(-1)
    best, second = readout.topk(2).indices.tolist()
    gap = float(readout[best] - readout[second])
    (one,) = judged(model, PROMPTS[:1], [[second]])
    assert (one.differs_at, one.ours, one.theirs) == (0, best, second)
    assert one.gap == pytest.approx(gap, rel=1e-4)
    assert one.agrees(gap * 1.01)
    assert not one.agrees(gap * 0.99)


def test_an_engine_that_is_not_there_is_refused_with_what_to_install(
    imported: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "find_spec", lambda _name: None)
    with pytest.raises(VerifyError, match=r"pip install vllm.*--verify-python"):
        other_texts("vllm", imported[0], "float32", PROMPTS, 3)
    with pytest.raises(VerifyError, match="--verify-python /no/python"):
        other_texts("vllm", imported[0], "float32", PROMPTS, 3, python="/no/python")


def test_what_an_engine_prints_also_when_it_ends_is_not_taken_for_its_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As vLLM 0.32 does, by its processes.
    (tmp_path / "vllm.py").write_text(
        "import atexit, os\n"
        "__version__ = '0'\n"
        "class SamplingParams:\n    def __init__(self, **_): pass\n"
        "class LLM:\n"
        "    def __init__(self, **_): print('loading'); atexit.register(os.system, 'echo engine ended')\n"
        "    def generate(self, prompts, _):\n"
        "        text = type('Text', (), {'token_ids': [7]})\n"
        "        return [type('Found', (), {'outputs': [text]}) for _ in prompts]\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert other_texts("vllm", tmp_path, "float32", PROMPTS, 1, sys.executable) == ("0", [[7]] * len(PROMPTS))


def test_a_run_without_held_out_data_asks_for_prompts(imported: tuple[Path, Path], tmp_path: Path) -> None:
    out = CliRunner().invoke(command, [str(imported[1]), str(tmp_path / "out"), "--verify", "transformers"])
    assert out.exit_code == 1
    assert "--verify-prompt" in out.output
    assert not (tmp_path / "out").exists()
    alone = CliRunner().invoke(command, [str(imported[1]), str(tmp_path / "x"), "--verify-prompt", "a"])
    assert "--verify-prompt: is for --verify" in alone.output


def test_held_out_conversations_give_prompts_of_the_ids_that_the_model_read(
    imported: tuple[Path, Path], tmp_path: Path
) -> None:
    template = read_chat_template(imported[0])
    turns = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "and the dog"}]
    documents = [Document(f"{n}", conversation_text({"messages": turns}, "messages")) for n in range(40)]
    layout = ChatLayout(template)
    prepare(
        documents,
        tmp_path / "chats",
        tokenizer=imported[0],
        held_out_fraction=0.3,
        packed_seq_len=SEQ_LEN,
        chat=layout,
    )
    spec = tiny_run(tmp_path / "chats", tmp_path / "run")
    open_run(replace(spec, train=replace(spec.train, seq_len=SEQ_LEN)), "data", tmp_path / "chats")
    found = ChatEncoder(tokenizer_from_file(imported[0]), layout, SEQ_LEN).encode(documents[0].text)
    assert found is not None
    for prompt in held_out_prompts(tmp_path / "run", 3):
        shared = min(len(prompt), len(found.ids))
        assert prompt[:shared] == found.ids[:shared].tolist()


@pytest.mark.slow  # another process imports transformers
def test_the_command_prints_a_table_and_tells_by_its_exit_code(
    imported: tuple[Path, Path], tmp_path: Path
) -> None:
    options = ["--verify", "transformers", "--verify-prompt", "the cat", "--verify-tokens", "6"]
    ran = CliRunner().invoke(
        command, [str(imported[1]), str(tmp_path / "out"), *options, "--verify-python", sys.executable]
    )
    assert ran.exit_code == 0, ran.output
    assert "all 6 tokens agree" in ran.output
