"""Served models whose weights are streamed: the tokens and log-probabilities of resident ones, within the memory of the whole process."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path

import httpx
import pytest
import tomli_w
from click.testing import CliRunner

from checkpoint.saved_models import save_models
from phalanx.checkpoint.pack.reader import open_pack
from phalanx.checkpoint.pack.writer import pack
from phalanx.data.tokenizers.tokenizer import BytesTokenizer
from phalanx.model.custom import Chain
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.read import to_table
from phalanx.run.spec import ModelSpec
from phalanx_serve.cli.serve_command import command
from phalanx_serve.engine.engine import Engine
from phalanx_serve.generate import generate, load_model
from phalanx_serve.http.counts import Counts
from phalanx_serve.http.worker import EngineWorker, WorkerLoad
from phalanx_serve.served import of_run
from phalanx_serve.served.of_run import open_engine
from phalanx_serve.served.opened import OpenedEngine
from phalanx_serve.served.served_run import ServedRun
from phalanx_serve.traffic.events import Ended, EngineOutput, Request, Sampling, ServeError
from phalanx_serve.weights.budget import (
    LIBRARIES,
    Computing,
    TooLargeError,
    divide_budget,
    divide_memory,
    least_bytes,
    text_bytes,
)
from serve.http.served import server
from serve.packed_runs import DENSE, MIXTURE, MODELS, make_pack, make_run

ROWS, CONTEXT = 32, 64
REQUESTS = [
    Request(
        f"r{number}",
        tuple(range(1, length)),
        tokens,
        Sampling(seed=number, temperature=0.8),
        top_logprobs=3,
        prompt_logprobs=number == 1,
    )
    for number, (length, tokens) in enumerate([(3, 9), (41, 5), (20, 12), (2, 1), (9, 4)])
]


def served(place: Path, *, stream: bool, dtype: str = "float32", memory: int = 0) -> OpenedEngine:
    return open_engine(
        ServedRun(
            str(place),
            None,
            dtype,
            CONTEXT,
            memory or (0 if stream else 64 << 20),
            ROWS,
            "exact",
            stream=stream,
            texts=3,
        )
    )


def tight(monkeypatch: pytest.MonkeyPatch, path: Path, spec: ModelSpec) -> int:
    """The least memory in which a pack streams, as if this process took nothing."""
    monkeypatch.setattr(of_run, "resident_memory", lambda: 0)
    computing = Computing(ROWS, ROWS, CONTEXT).nbytes(spec, "float32")
    of_text = text_bytes(spec, "float32", CONTEXT)
    return LIBRARIES + computing + of_text + least_bytes(open_pack(path).index, "float32")


def told(opened: OpenedEngine) -> dict[str, list[EngineOutput]]:
    """What is told of the requests, the last two of which are asked for in the middle of the others."""
    engine = opened.engine
    found: dict[str, list[EngineOutput]] = {request.id: [] for request in REQUESTS}
    for request in REQUESTS[:3]:
        engine.submit(request)
    for one in engine.step():
        found[one.request].append(one)
    for request in REQUESTS[3:]:
        engine.submit(request)
    while engine.busy:
        for one in engine.step():
            found[one.request].append(one)
    return found


@pytest.mark.parametrize("kind", MODELS)
def test_a_streaming_server_tells_what_a_resident_one_tells_by_bits(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_pack(tmp_path, MODELS[kind], "fp32")
    resident, whole = served(tmp_path / "run-fp32", stream=False), served(path, stream=False)
    expected = told(resident)
    assert told(whole) == expected
    streamed = served(path, stream=True, memory=tight(monkeypatch, path, MODELS[kind]))
    assert "0 of 5 layers stay" in streamed.note
    assert told(streamed) == expected
    assert streamed.streaming is not None
    metrics = Counts("m").render(WorkerLoad(streaming=streamed.streaming())).decode()
    assert streamed.streaming().bytes_read > path.stat().st_size
    (told_bytes,) = re.findall(r"^phalanx_weights_read_bytes_total.* (\S+)$", metrics, re.MULTILINE)
    assert float(told_bytes) == streamed.streaming().bytes_read
    assert streamed.identity == whole.identity == resident.identity


def test_a_run_is_packed_and_streams_a_narrow_format_as_its_pack_has_it(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", DENSE)
    streamed = served(run, stream=True, dtype="bfloat16")
    (path,) = (run / "packs").iterdir()
    assert path.name.endswith("-bf16.pack")
    assert streamed.identity == served(path, stream=False, dtype="bfloat16").identity
    assert streamed.identity != served(path, stream=False).identity


def test_only_as_many_texts_are_computed_at_a_time_as_memory_holds(tmp_path: Path) -> None:
    streamed = served(make_pack(tmp_path, DENSE, "fp32"), stream=True)
    engine = streamed.engine
    assert isinstance(engine, Engine)
    for request in REQUESTS:
        engine.submit(request)
    engine.step()
    assert (engine.statistics().running, engine.statistics().waiting) == (3, 2)


@pytest.mark.parametrize("kind", MODELS)
def test_memory_is_divided_without_a_rest_and_too_little_is_refused_with_what_would_do(
    tmp_path: Path, kind: str
) -> None:
    index = open_pack(make_pack(tmp_path, MODELS[kind], "fp32")).index
    spec = MODELS[kind]
    process, computing = 1 << 28, Computing(ROWS, ROWS, CONTEXT).nbytes(spec, "float32")
    of_text, least = text_bytes(spec, "float32", CONTEXT), least_bytes(index, "float32")
    needed = process + computing + of_text + least
    for total in (needed, needed + 1, needed + of_text, needed + 3 * least, needed + (1 << 28)):
        budget = divide_budget(
            index, "float32", total, process=process, computing=computing, of_text=of_text, most_texts=1 << 20
        )
        assert process + computing + budget.texts * of_text + budget.weights == total
        assert divide_memory(index, "float32", budget.weights).nbytes <= budget.weights
    with pytest.raises(TooLargeError, match=f"needs {needed:,} bytes of memory"):
        divide_budget(
            index, "float32", needed - 1, process=process, computing=computing, of_text=of_text, most_texts=9
        )


def test_a_server_that_memory_does_not_hold_is_refused_with_the_number_that_would_do(tmp_path: Path) -> None:
    path = make_pack(tmp_path, MIXTURE, "fp32")
    refused = CliRunner().invoke(
        command, [str(path), "--port", "0", "--stream", "--memory", "1MiB", "--numerics", "fast"]
    )
    assert refused.exit_code == 1
    assert re.search(
        r"needs [\d,]+ bytes of memory .* may take 1,048,576: give it more \(--memory\)", refused.output
    )


def test_a_pack_that_was_cut_off_is_refused_at_the_start(tmp_path: Path) -> None:
    path = make_pack(tmp_path, DENSE, "fp32")
    torn = tmp_path / "torn.pack"
    torn.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    refused = CliRunner().invoke(command, [str(torn), "--port", "0", "--stream"])
    assert refused.exit_code == 1
    assert "it was cut off or not copied to its end" in refused.output


def test_damage_that_comes_while_it_serves_ends_requests_with_its_name_and_those_after_it_is_mended_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_pack(tmp_path, DENSE, "fp32")
    section = next(one for one in open_pack(path).index.sections if one.kind == "block" and one.layer == 3)
    whole = path.read_bytes()
    opened = served(path, stream=True, memory=tight(monkeypatch, path, DENSE))
    port = EngineWorker(opened.engine, opened.identity)

    async def last(name: str) -> EngineOutput:
        return [one async for one in port.submit(Request(name, (1, 2), 3))][-1]

    def write(byte: bytes) -> None:
        with path.open("r+b") as file:
            file.seek(section.start + 3)
            file.write(byte)
            os.fsync(file.fileno())

    assert asyncio.run(last("before")) == Ended("before", "length")
    write(bytes([whole[section.start + 3] ^ 255]))
    endings = [asyncio.run(last(f"damaged {number}")) for number in range(2)]
    assert all(isinstance(one, Ended) and one.outcome == "error" for one in endings)
    assert "layer 3, chunk 0" in str(endings[1])
    assert "a defect" not in str(endings)
    write(whole[section.start + 3 :][:1])
    again = [asyncio.run(last(f"mended {number}")) for number in range(3)]
    assert again[-1] == Ended("mended 2", "length")
    port.close()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_narrow_keys_and_values_are_refused_of_a_pack_of_a_model_that_keeps_none(
    tmp_path: Path, *, stream: bool
) -> None:
    spec = resolve(ModelSpec(factory="examples.mixer:Mixer", layers=1, dim=32, vocab_size=64))
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.toml").write_text(tomli_w.dumps({"model": to_table(spec)}))
    save_models(run / "checkpoints", {1: Chain(spec)})
    path = pack(run, None, tmp_path / "own.pack", "fp32")[0]
    asked = ServedRun(str(path), None, "float32", 16, 0, 16, "fast", kept="int8", stream=stream)
    with pytest.raises(ServeError, match=r"--kv int8: a model of your own \(model.factory\) keeps no keys"):
        open_engine(asked)


@pytest.mark.slow
def test_the_process_stays_within_its_memory_which_is_less_than_the_model_takes(tmp_path: Path) -> None:
    # 12 layers of 17 MB: 202 MB, of which two layers are there at a time.
    spec = resolve(ModelSpec(layers=12, dim=512, heads=8, kv_heads=8, ffn_dim=2048, vocab_size=264))
    run = make_run(tmp_path / "run", spec, seq_len=64)
    (run / "tokenizer").mkdir()
    BytesTokenizer().save(run / "tokenizer")
    path = pack(run, None, tmp_path / "model.pack", "fp32")[0]
    options = ["--stream", "--rows", "32"]
    with (
        pytest.raises(AssertionError, match="bytes of memory") as told_least,
        server(path, *options, "--memory", "1MiB"),
    ):
        pass
    needed = int(re.findall(r"needs ([\d,]+) bytes", str(told_least.value))[0].replace(",", ""))
    memory = needed + (48 << 20)
    assert needed - least_bytes(open_pack(path).index, "float32") + (202 << 20) > memory
    with server(path, *options, "--memory", str(memory)) as (url, process):
        body = {"model": "model", "prompt": "ab", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{url}/completions", json=body | {"return_token_ids": True}, timeout=1000).json()
        status = Path(f"/proc/{process.pid}/status").read_text()
    peak = int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) << 10
    assert peak <= memory
    model, _ = load_model(run)
    assert answer["choices"][0]["token_ids"] == list(
        generate(model, [97, 98], tokens=8, temperature=0, numerics="exact")
    )
