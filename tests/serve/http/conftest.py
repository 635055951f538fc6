"""A server of a tiny model with a chat template, in a process of its own; or the one whose URL is given."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from parity.llama3_folder import save_llama3
from phalanx.checkpoint.interop.huggingface.convert import import_hf
from serve.http.served import server

OTHER_SERVER = "PHALANX_TEST_SERVER"
"""The base URL of a server of any make that the contract is tried on instead."""


@pytest.fixture(scope="session")
def chat_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the weights, the tokenizer and the chat template of a tiny Llama."""
    folder = tmp_path_factory.mktemp("gateway")
    save_llama3(folder / "llama3")
    import_hf(folder / "llama3", folder / "run")
    return folder / "run"


@pytest.fixture(scope="session")
def base_url(chat_run: Path) -> Iterator[str]:
    if other := os.environ.get(OTHER_SERVER):
        yield other
        return
    with server(chat_run, "--context", "128") as (url, _):
        yield url


@pytest.fixture(scope="session")
def client(base_url: str) -> OpenAI:
    return OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="session")
def model(client: OpenAI) -> str:
    return client.models.list().data[0].id
