"""A model whose layers several processes share serves the tokens and log-probabilities of one process, to the bit."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from phalanx.model.transformer import Transformer
from phalanx.run.kinds.whole_model import resolve
from phalanx_serve.engine.engine import Engine
from phalanx_serve.kv_cache.memory import KVFormat, PageMemory
from phalanx_serve.served.of_run import open_engine
from phalanx_serve.served.opened import OpenedEngine
from phalanx_serve.stages import far_part
from phalanx_serve.stages.shares import Share, divided, restored_part, restored_share
from phalanx_serve.traffic.events import (
    EngineOutput,
    PartLostError,
    Request,
    Sampling,
    ServeError,
    WorkerIdentity,
)
from phalanx_serve.traffic.scheduler import page_names
from phalanx_serve.workers.page_transfer import OfferedPages, PageServer, pull
from serve.packed_runs import DENSE, make_run
from serve.stages.staged_models import KINDS, TOKEN, served, shared, staged


def paged(opened: OpenedEngine) -> Engine:
    assert isinstance(opened.engine, Engine)
    return opened.engine


def requests(count: int) -> list[Request]:
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 64, (5 + 40 * n,), generator=generator).tolist() for n in range(count)]
    return [
        Request(f"r{n}", tuple(text), 9, Sampling(seed=n), top_logprobs=2, prompt_logprobs=n % 2 == 0)
        for n, text in enumerate(prompts)
    ]


def run_all(engine: Engine, requests: Sequence[Request]) -> dict[str, list[EngineOutput]]:
    """Outputs of requests of which one arrives before each step."""
    outputs: dict[str, list[EngineOutput]] = {request.id: [] for request in requests}
    waiting = list(requests)
    while waiting or engine.busy:
        if waiting:
            engine.submit(waiting.pop(0))
        for output in engine.step():
            outputs[output.request].append(output)
    return outputs


@pytest.mark.parametrize(
    ("kind", "stages"),
    [
        ("tied", 3),
        ("latent mixture", 2),
        ("absorbed", 2),
        pytest.param("dense", 2, marks=pytest.mark.slow),
        pytest.param("window", 5, marks=pytest.mark.slow),
    ],
)
def test_stages_give_the_outputs_of_one_process_to_the_bit(tmp_path: Path, kind: str, stages: int) -> None:
    run = make_run(tmp_path / "run", KINDS[kind], seq_len=192)
    undivided, parted = open_engine(served(run)), staged(run, stages)
    assert parted.identity == undivided.identity
    submitted = requests(4)
    assert run_all(paged(parted), submitted) == run_all(paged(undivided), submitted)
    # All pages of this request are in memory.
    again = [structs.replace(submitted[-1], id="again", sampling=Sampling(seed=9))]
    assert run_all(paged(parted), again) == run_all(paged(undivided), again)
    assert paged(parted).statistics().cached_tokens == paged(undivided).statistics().cached_tokens > 0


def test_texts_that_give_up_their_pages_and_pages_that_come_from_others_have_the_bits_of_one_process(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path / "run", KINDS["dense"], seq_len=192)
    undivided = paged(open_engine(served(run)))
    submitted = [structs.replace(request, prompt_logprobs=False) for request in requests(5)]
    expected = run_all(undivided, submitted)
    # A process has room for five pages of two of the five layers, and as much again for the text's own.
    page = undivided.page_bytes * 2 // 5
    crowded = paged(staged(run, 3, memory_bytes=5 * 2 * page))
    assert crowded.pages()[1] == 5
    assert {name: outputs[:-1] for name, outputs in run_all(crowded, submitted).items()} == {
        name: outputs[:-1] for name, outputs in expected.items()
    }
    assert crowded.statistics().preempted > 0
    names, fresh = page_names(submitted[-1].prompt, undivided.root), paged(staged(run, 3))
    give(undivided, fresh, names)
    assert run_all(fresh, submitted[-1:])[submitted[-1].id][:-1] == expected[submitted[-1].id][:-1]
    assert fresh.statistics().cached_tokens == len(names) * 64
    # A page is the same in every division of the model, so it can move on to any other.
    assert [fresh.read_page(name) for name in names] == [undivided.read_page(name) for name in names]


def give(source: Engine, taker: Engine, names: list[bytes]) -> None:
    """Give pages of one engine to another, as workers do."""
    assert source.held_pages(names) == names
    offered = OfferedPages()
    offered.offer(1, {name: source.read_page(name) for name in names})
    identity = WorkerIdentity(source.weights_id, source.numerics_id, source.root.hex())
    assert identity == WorkerIdentity(taker.weights_id, taker.numerics_id, taker.root.hex())
    server = PageServer(offered, identity, TOKEN)
    try:
        came = pull("127.0.0.1", server.port, TOKEN, identity, 1, names, page_bytes=taker.page_bytes)
    finally:
        server.close()
    for before, name in zip([taker.root, *names], names, strict=False):
        assert taker.write_page(name, came.pages[name], before)


def test_a_part_has_the_weights_of_its_layers_alone(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", KINDS["tied"])
    parts = [restored_part(run, 1, layers, torch.float32)[0] for layers in divided(KINDS["tied"], 3)]
    weight_names = [{*part.state_dict()} for part in parts]
    assert not weight_names[0] & weight_names[1]
    assert not weight_names[1] & weight_names[2]
    assert "embedding.weight" in weight_names[0]
    assert "head.weight" in weight_names[2]
    assert not any(name.startswith(("embedding", "head", "norm")) for name in weight_names[1])


@given(st.integers(1, 12), st.integers(1, 12))
def test_every_layer_is_in_one_part_and_none_has_much_more_than_its_share(layers: int, stages: int) -> None:
    spec = resolve(replace(DENSE, layers=layers))
    if stages > layers:
        with pytest.raises(ServeError, match=f"the model has {layers} layers"):
            divided(spec, stages)
        return
    parts = divided(spec, stages)
    assert [layer for part in parts for layer in part] == list(range(layers))
    assert max(map(len, parts)) <= -(-layers // stages)


def test_a_stage_that_is_gone_is_named_and_the_engine_computes_nothing_any_more(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", KINDS["dense"])
    engine = paged(staged(run, 2))
    engine.submit(requests(1)[0])
    engine.step()
    assert engine._far is not None
    engine._far.close()  # type: ignore[attr-defined]
    with pytest.raises(PartLostError, match=r"stage 1 \(layers 3 to 4, 127.0.0.1:\d+\) of the model is gone"):
        # Some of the steps that were under way may have been answered before.
        [engine.step() for _ in range(3)]


@pytest.mark.parametrize(
    ("kind", "shares", "dtype"),
    [
        ("tied", 2, "float32"),
        ("latent mixture", 2, "float32"),
        ("absorbed", 2, "float32"),
        ("dense", 2, "bfloat16"),
        pytest.param("dense", 2, "float32", marks=pytest.mark.slow),
        pytest.param("window", 2, "float32", marks=pytest.mark.slow),
    ],
)
def test_processes_that_share_each_layer_give_the_outputs_of_one_to_the_bit(
    tmp_path: Path, kind: str, shares: int, dtype: str
) -> None:
    run = make_run(tmp_path / "run", KINDS[kind], seq_len=192)
    undivided, parted = open_engine(served(run, dtype=dtype)), shared(run, shares, dtype=dtype)
    assert parted.identity == undivided.identity
    submitted = requests(4)
    assert run_all(paged(parted), submitted) == run_all(paged(undivided), submitted)
    again = [
        structs.replace(submitted[-1], id="again", sampling=Sampling(seed=9))
    ]  # all its pages are in memory
    assert run_all(paged(parted), again) == run_all(paged(undivided), again)
    assert paged(parted).statistics().cached_tokens == paged(undivided).statistics().cached_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "latent mixture"])
def test_shares_of_pages_come_back_in_the_place_of_those_given_up(tmp_path: Path, kind: str) -> None:
    run = make_run(tmp_path / "run", KINDS[kind], seq_len=192)
    undivided = paged(open_engine(served(run)))
    submitted = [structs.replace(request, prompt_logprobs=False) for request in requests(4)]
    expected = run_all(undivided, submitted)
    part = undivided.page_bytes // (2 if kind == "dense" else 1)  # each process has the full latents
    crowded = paged(shared(run, 2, memory_bytes=4 * 2 * part))
    assert crowded.pages()[1] == 4
    assert {name: outputs[:-1] for name, outputs in run_all(crowded, submitted).items()} == {
        name: outputs[:-1] for name, outputs in expected.items()
    }
    assert crowded.statistics().preempted > 0


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("dense", {}),
        ("absorbed", {}),
        pytest.param(
            "dense", {"numerics": "fast", "kept": "int8", "dtype": "bfloat16"}, marks=pytest.mark.slow
        ),
    ],
)
def test_pages_go_between_any_divisions_of_a_model_with_the_bits_of_one_process(
    tmp_path: Path, kind: str, options: dict[str, str]
) -> None:
    spec = resolve(replace(KINDS[kind], head_dim=32)) if "kept" in options else KINDS[kind]
    run = make_run(tmp_path / "run", spec, seq_len=192)
    request = structs.replace(requests(5)[-1], prompt_logprobs=False)
    engines = [
        paged(opened)
        for opened in (
            open_engine(served(run, **options)),
            shared(run, 2, **options),
            staged(run, min(3, spec.layers), **options),
        )
    ]
    assert len({(engine.root, engine.page_bytes, engine.numerics_id) for engine in engines}) == 1
    names = page_names(request.prompt, engines[0].root)
    first = run_all(engines[0], [request])[request.id][:-1]
    pages = [engines[0].read_page(name) for name in names]
    # From one process to two, from these to stages; then the pages that two have computed, to one.
    for source, taker in pairwise(engines):
        give(source, taker, names)
        assert [taker.read_page(name) for name in names] == pages
        outputs = run_all(taker, [request])[request.id][:-1]
        if "kept" not in options:
            assert outputs == first
        assert taker.statistics().cached_tokens == len(names) * 64
    other = structs.replace(request, id="other", prompt=request.prompt[::-1])
    names = page_names(other.prompt, engines[0].root)
    outputs = run_all(engines[1], [other])["other"][:-1]
    give(engines[1], engines[0], names)
    again = run_all(engines[0], [other])["other"][:-1]
    if "kept" not in options:
        assert again == outputs
    assert engines[0].statistics().cached_tokens == len(names) * 64


def test_a_share_has_its_part_of_the_weights(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", KINDS["latent mixture"])
    shares = [restored_share(run, 1, Share(n, 2), torch.float32)[0] for n in range(2)]
    sizes = [sum(value.numel() for value in share.parameters()) for share in shares]
    total = sum(value.numel() for value in Transformer(KINDS["latent mixture"]).parameters())
    # Both have norms, routers, and the projections to latents.
    assert total < sum(sizes) < 1.2 * total
    assert max(sizes) < 0.7 * total


def test_a_step_that_fails_in_a_share_ends_the_service_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", KINDS["dense"])
    engine = paged(shared(run, 2))

    def failing(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(far_part.FarPart, "_passed", failing)
    engine.submit(requests(1)[0])
    for _ in range(2):
        with pytest.raises(PartLostError, match=r"share 1 of 2 \(of every layer, 127.0.0.1:\d+\) .*no room"):
            engine.step()


def test_steps_of_other_texts_are_computed_while_one_is_with_a_later_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", KINDS["dense"])
    engine = paged(staged(run, 2))
    gate, entered = threading.Event(), threading.Event()
    compute = far_part.FarPart._compute

    def waiting(*arguments: object) -> object:
        entered.set()
        assert gate.wait(60)
        return compute(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(far_part.FarPart, "_compute", waiting)
    submitted = [structs.replace(text, prompt_logprobs=False) for text in requests(2)]
    for text in submitted:
        engine.submit(text)
    assert engine.step() == []  # the first text is with the other stage, and stays there
    assert entered.wait(60)
    here = engine._runner.compute

    def computed(*arguments: object) -> object:
        gate.set()  # the other stage continues once the second text is computed here
        return here(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(engine._runner, "compute", computed)
    assert {output.request for output in engine.step()} == {submitted[0].id}
    assert gate.is_set()


def test_a_stage_that_has_no_room_for_the_pages_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", KINDS["dense"])

    def refusing(layers: int, pages: int, kept: KVFormat) -> PageMemory:
        if pages:
            raise MemoryError("no room")
        return PageMemory(layers, pages, kept)

    monkeypatch.setattr(far_part, "PageMemory", refusing)
    with pytest.raises(ServeError, match=r"stage 1 .*no room.*give the server less --memory"):
        staged(run, 2)


def test_a_stage_that_loses_keys_ends_with_the_reason_and_no_answer_is_taken_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", KINDS["dense"], seq_len=192)
    engine = paged(staged(run, 2))
    (request,) = requests(1)
    run_all(engine, [request])

    def failing(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(far_part.FarPart, "_run", failing)
    with pytest.raises(PartLostError, match=r"stage 1 .*no room"):
        run_all(engine, [request])


def test_a_step_that_fails_in_a_stage_changes_nothing_of_the_texts_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", KINDS["dense"], seq_len=192)
    engine = paged(staged(run, 2))
    first, second = requests(2)
    expected = run_all(engine, [second])

    def failing(*_: object) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as context:
        context.setattr(far_part.FarPart, "_compute", failing)
        with pytest.raises(RuntimeError, match=r"stage 1 .*no room"):
            run_all(engine, [first])
    engine.cancel(first.id)
    engine.step()
    outputs = run_all(engine, [structs.replace(second, id="again")])["again"]
    assert [structs.replace(output, request=second.id) for output in outputs][:-1] == expected[second.id][:-1]
