"""A folder of Hugging Face is served where it lies, with the bits of the run that an import makes of it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from openai import OpenAI

from parity.llama3_folder import save_llama3
from serve.http.served import server

ASKED = {"prompt": "the cat and", "max_tokens": 12, "seed": 3, "logprobs": 2}


@pytest.fixture
def llama3(chat_run: Path) -> Path:
    """The folder that ``chat_run`` is imported from."""
    return chat_run.parent / "llama3"


def test_a_folder_is_served_with_the_bits_of_its_import_and_leaves_nothing(
    llama3: Path, client: OpenAI, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = client.completions.create(model=model, **ASKED)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with server(llama3, "--context", "128") as (url, process):
        ours = OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120)
        found = ours.completions.create(model="llama3", **ASKED)
        assert [path.name[:18] for path in tmp_path.iterdir()] == ["phalanx-published-"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert found.choices == expected.choices
    assert found.system_fingerprint == expected.system_fingerprint
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("options", [("--workers", "2"), ("--tensor", "2"), ("--pipeline", "2")])
def test_processes_that_divide_a_folder_say_what_one_says(options: tuple[str, ...], tmp_path: Path) -> None:
    # Parts of its matrices' outputs have the bits of the whole, as those of any model of a useful size; smaller ones have not.
    save_llama3(tmp_path / "llama3", {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 320})
    told = []
    for given in ((), options):
        with server(tmp_path / "llama3", "--context", "128", *given) as (url, _):
            ours = OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120)
            told.append(ours.completions.create(model="llama3", **ASKED).choices)
    assert told[0] == told[1]
