"""What the name of a device means, and what becomes of a device's errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from phalanx.data.tokenizers.tokenizer import BytesTokenizer
from phalanx.model.custom import Chain
from phalanx.model.transformer import Transformer
from phalanx.run.kinds.whole_model import resolve
from phalanx_serve.cli import generate_command, serve_command
from phalanx_serve.cli.scoring import eval_command, score_command
from phalanx_serve.engine.engine import Engine
from phalanx_serve.generate import generate
from phalanx_serve.http.worker import explained
from phalanx_serve.kv_cache.memory import PageMemory, TextKV
from phalanx_serve.numerics import computing_on, device_named, numerics_id, shown_device
from phalanx_serve.served.of_run import open_engine
from phalanx_serve.served.opened import TurnsEngine
from phalanx_serve.served.served_run import ServedRun
from phalanx_serve.traffic.events import (
    DeviceMemoryError,
    Ended,
    GenerationRequestError,
    PartLostError,
    Request,
    Role,
    Sampling,
    ServeError,
    WorkerIdentity,
)
from phalanx_serve.traffic.scheduler import page_names
from phalanx_serve.workers.messages import RunJob
from phalanx_serve.workers.page_transfer import Pulled
from phalanx_serve.workers.service import WorkerDivision, devices_of
from phalanx_serve.workers.serving_worker import ServingWorker, _Came
from serve.engine.test_engine import built, run
from serve.packed_runs import DENSE, make_run

GPU = torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("name", "gpus", "number", "expected"),
    [
        ("auto", 0, 0, "cpu"),
        ("auto", 1, 0, "cuda:0"),
        ("auto", 4, 6, "cuda:2"),
        ("cpu", 4, 0, "cpu"),
        ("cuda", 2, 3, "cuda:1"),
        ("cuda:1", 2, 0, "cuda:1"),
        ("cuda:1", 2, 5, "cuda:1"),
    ],
)
def test_a_name_means_a_device_and_workers_take_gpus_in_turn(
    name: str, gpus: int, number: int, expected: str
) -> None:
    assert device_named(name, gpus, number=number) == torch.device(expected)
    assert device_named("auto", gpus, only_cpu="why", number=number) == torch.device("cpu")


NO_DEVICES = ("mps", "foo", "cuda:x", "cuda:-1", "cuda:", "auto:1", "cpu:0")


@pytest.mark.parametrize(
    ("name", "gpus", "only_cpu", "message"),
    [
        ("cuda", 0, "", r"--device cuda: PyTorch sees no GPU here; serve with --device cpu"),
        ("cuda:2", 2, "", r"--device cuda:2: there are 2 GPUs here, so the last is cuda:1"),
        ("cuda:1", 1, "", r"--device cuda:1: there is one GPU here, cuda:0"),
        ("cuda", 8, "the weights are elsewhere", r"--device cuda: the weights are elsewhere"),
        *((name, 2, "", rf"--device {name}: .*write auto, cpu, cuda, or cuda:1") for name in NO_DEVICES),
    ],
)
def test_a_device_that_is_not_there_is_refused_by_its_name(
    name: str, gpus: int, only_cpu: str, message: str
) -> None:
    with pytest.raises(ServeError, match=message):
        device_named(name, gpus, only_cpu=only_cpu)


def served(**options: object) -> ServedRun:
    fields = {"step": None, "dtype": "float32", "context": None, "memory_bytes": 1 << 20, "rows": 64}
    return ServedRun("nowhere", **{**fields, "numerics": "fast", "device": "auto", **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "cuda:0"),
        ({"numerics": "exact"}, "cpu"),
        ({"stream": True}, "cpu"),
        ({"stages": 2}, "cpu"),
        ({"tensor": 2}, "cpu"),
    ],
)
def test_what_a_gpu_cannot_compute_is_computed_by_the_cpu_unless_a_gpu_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, object], expected: str
) -> None:
    monkeypatch.setattr("phalanx_serve.served.opened.gpus", lambda: 2)
    assert str(devices_of(served(**options), 1)[0]) == expected
    if expected == "cpu":
        with pytest.raises(ServeError, match="--device cuda: "):
            open_engine(served(**options, device="cuda"))
    else:
        assert list(map(str, devices_of(served(**options), 5))) == ["cuda:0", "cuda:1"]


def test_workers_of_all_roles_compute_on_one_kind_of_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx_serve.served.opened.gpus", lambda: 2)
    roles: dict[Role, WorkerDivision] = {"prefill": WorkerDivision(tensor=2), "decode": WorkerDivision()}
    assert list(map(str, devices_of(served(), 3, roles))) == ["cpu"]
    whole = dict.fromkeys(roles, WorkerDivision())
    assert list(map(str, devices_of(served(), 3, whole))) == ["cuda:0", "cuda:1"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "cuda"], "kernels for CPUs: serve with --numerics fast"),
        (["--device", "cuda", "--workers", "2"], "kernels for CPUs"),
        (["--device", "cuda", "--numerics", "fast"], "PyTorch sees no GPU here"),
        (["--device", "cuda", "--stream"], "--stream reads weights into the host's memory"),
        (["--device", "cuda:1", "--pipeline", "2"], "--pipeline and --tensor"),
        (["--device", "gpu"], "'gpu' is no device: write auto, cpu, cuda, or cuda:1"),
    ],
)
def test_serve_says_why_a_gpu_cannot_compute(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: list[str], message: str
) -> None:
    monkeypatch.setattr("phalanx_serve.served.opened.gpus", lambda: 0)
    assert message in flat(CliRunner().invoke(serve_command.command, [str(tmp_path), "--port", "0", *words]))


def test_text_and_scores_come_of_the_cpu_where_there_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for place in ("phalanx_serve.generate", "phalanx.hardware.local.device"):
        monkeypatch.setattr(f"{place}.gpus", lambda: 0)
    place, text = make_run(tmp_path / "run", replace(DENSE, vocab_size=257)), tmp_path / "text.jsonl"
    (place / "tokenizer").mkdir()
    BytesTokenizer().save(place / "tokenizer")
    text.write_text('{"tokens": [1, 2, 3]}\n')
    asked = [str(place), "--temperature", "0", "--tokens", "4"]
    plain, named = (
        CliRunner().invoke(generate_command.command, [*asked, *more]) for more in ([], ["--device", "cpu"])
    )
    assert (plain.exit_code, plain.output) == (0, named.output)
    for asked_of, words in (
        (generate_command.command, asked),
        (generate_command.command, [*asked, "--dtype", "bfloat16"]),
        (score_command, [str(place), str(text)]),
    ):
        done = CliRunner().invoke(asked_of, [*words, "--device", "cuda"])
        assert done.exit_code == 1
        assert "--device cuda: PyTorch sees no GPU here" in flat(done)
    scored = [
        CliRunner().invoke(score_command, [str(place), str(text), *more]).output
        for more in ([], ["--device", "auto"])
    ]
    assert scored[0] == scored[1]
    assert "text 1: 2 tokens scored" in scored[0]


@pytest.mark.parametrize("lost", [DeviceMemoryError("no memory"), PartLostError("no answer")], ids=str)
def test_commands_that_a_gpu_does_not_come_to_the_end_of_tell_it_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lost: Exception
) -> None:
    place, text = make_run(tmp_path / "run", replace(DENSE, vocab_size=257)), tmp_path / "text.jsonl"
    (place / "tokenizer").mkdir()
    BytesTokenizer().save(place / "tokenizer")
    text.write_text('{"text": "abc"}\n')

    def failing(*_: object, **__: object) -> list[torch.Tensor]:
        raise torch.OutOfMemoryError

    @contextmanager
    def on_a_gpu(_: torch.device, what: str) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError:
            raise type(lost)(f"{lost} for {what}") from None

    for module in ("numerics", "served.of_run"):
        monkeypatch.setattr(f"phalanx_serve.{module}.computing_on", on_a_gpu)
    for method in ("score", "score_sequences"):
        monkeypatch.setattr(f"phalanx.train.score.Scorer.{method}", failing)
    scored = CliRunner().invoke(score_command, [str(place), str(text)])
    assert f"Error: {lost} for the scores of a text" in flat(scored)
    evaluated = CliRunner().invoke(eval_command, [str(place), "--file", str(text), "--kind", "text"])
    assert f"Error: {lost} for the scores of a task" in flat(evaluated)

    monkeypatch.setattr("phalanx_serve.served.of_run.restored_model", failing)
    served = CliRunner().invoke(serve_command.command, [str(place), "--port", "0", "--numerics", "fast"])
    assert f"Error: {lost} for the weights in float32" in flat(served)

    def broken_off(*_: object, **__: object) -> Iterator[str]:
        yield "some"
        raise lost

    monkeypatch.setattr("phalanx_serve.generate.continued", broken_off)
    assert f"Error: {lost}" in flat(CliRunner().invoke(generate_command.command, [str(place)]))


def test_pages_that_a_gpu_has_no_memory_for_are_computed_and_take_no_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @contextmanager
    def on_a_gpu(*_: object) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError:
            raise DeviceMemoryError("no memory") from None

    def failing(*_: object) -> bytes:
        raise torch.OutOfMemoryError

    model: Transformer = built("dense")
    engine = Engine(model, model.spec, numerics="fast", pages=4, weights_id="w")
    request = Request("r", tuple(range(70)), 1)
    (name,) = page_names(request.prompt, engine.root)
    worker = ServingWorker(engine, WorkerIdentity("w", "n", "p"), engine.page_bytes, "token", None)  # type: ignore[arg-type]
    with monkeypatch.context() as patch:
        patch.setattr("phalanx_serve.engine.engine.computing_on", on_a_gpu)
        patch.setattr(PageMemory, "write", failing)
        with pytest.raises(DeviceMemoryError, match="no memory"):
            engine.write_page(name, bytes(engine.page_bytes), engine.root)
        worker._orders[1] = order = RunJob(1, request)
        worker._keep(_Came(order.job, Pulled({name: bytearray(engine.page_bytes)}), 1))
        assert engine.pages() == (0, 4)
        assert engine.busy, "its request is computed"
        while engine.busy:
            engine.step()
        patch.setattr(PageMemory, "read", failing)
        assert worker._read_pages([name]) == {}
    assert len(worker._read_pages([name])[name]) == engine.page_bytes


class NoMemory(Chain):
    """A model of a user's own on a GPU that has no memory for a pass."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.spec = resolve(DENSE)
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, *_: object, **__: object) -> torch.Tensor:  # type: ignore[override]
        raise torch.OutOfMemoryError


def test_models_of_ones_own_say_what_would_help_and_end_with_their_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost: list[Exception] = []

    @contextmanager
    def on_a_gpu(*_: object) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError:
            raise lost[0] from None

    for place in ("generate", "served.opened"):
        monkeypatch.setattr(f"phalanx_serve.{place}.computing_on", on_a_gpu)
    engine, request = TurnsEngine(NoMemory(), 64), Request("r", (1, 2, 3), 4)
    lost.append(DeviceMemoryError("no memory: compute on the CPU"))
    engine.submit(request)
    assert engine.step() == [Ended("r", "error", "no memory: compute on the CPU")]
    with pytest.raises(DeviceMemoryError, match="on the CPU"):
        next(generate(NoMemory(), [1, 2, 3], tokens=4))
    lost[0] = PartLostError("no answer")
    engine.submit(request)
    with pytest.raises(PartLostError, match="no answer"):
        engine.step()


def test_a_second_request_of_the_same_id_is_refused_and_the_first_is_computed() -> None:
    engine, request = TurnsEngine(NoMemory(), 64), Request("r", (1, 2, 3), 4)
    engine.submit(request)
    with pytest.raises(GenerationRequestError, match="'r' is being computed: give each its own id"):
        engine.submit(Request("r", (4, 5), 1))
    assert [output.request for output in engine.step()] == ["r"]
    engine.submit(request)


def test_packed_weights_of_portable_numerics_generate_on_the_cpu_as_the_runs_own_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = make_run(tmp_path / "run", DENSE)
    asked: list[str] = []

    class Opened:
        def to(self, device: torch.device) -> None:
            asked.append(str(device))

    monkeypatch.setattr("phalanx.hardware.local.device.gpus", lambda: 1)
    monkeypatch.setattr("phalanx_serve.numerics.make_current", lambda _: None)
    monkeypatch.setattr("phalanx_serve.generate.continued", lambda *_, **__: iter(["text"]))
    monkeypatch.setattr("phalanx_serve.weights.open_model.open_model", lambda *_, **__: (Opened(), None))
    for portable in (False, True):
        monkeypatch.setattr("phalanx.hardware.portable.operations.begun", lambda portable=portable: portable)
        for device in ("auto", "cuda"):
            words = [str(place), "--dtype", "bfloat16", "--device", device]
            assert CliRunner().invoke(generate_command.command, words).exit_code == 0
    assert asked == ["cuda:0", "cuda:0", "cpu", "cuda:0"]


def flat(done: Result) -> str:
    return " ".join(done.output.split())


def test_an_engine_on_a_device_by_the_name_of_the_cpu_is_the_engine_of_before() -> None:
    model: Transformer = built("dense")
    texts = [
        Request(
            "r", tuple(range(5, 80)), 12, Sampling(seed=1, top_p=0.9), top_logprobs=2, prompt_logprobs=True
        )
    ]
    found = [run(Engine(one, one.spec, pages=4, weights_id="w"), texts) for one in (model, model.to("cpu"))]
    assert found[0] == found[1]
    cpu = numerics_id("exact", torch.float32)
    assert numerics_id("exact", torch.float32, device=torch.device("cpu")) == cpu


def test_the_id_of_numerics_holds_the_kind_of_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = {numerics_id("fast", torch.bfloat16)}
    for name in ("NVIDIA H100", "NVIDIA H200"):
        monkeypatch.setattr("phalanx_serve.numerics.device_name", lambda _, name=name: name)
        ids |= {numerics_id("fast", torch.bfloat16, device=torch.device("cuda", n)) for n in range(2)}
    assert len(ids) == 3


def test_memory_that_gives_out_is_told_with_what_would_help_and_a_dead_gpu_as_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = "phalanx_serve.numerics"
    for name in ("make_current", "give_back_memory"):
        monkeypatch.setattr(f"{place}.{name}", lambda _: None)
    with pytest.raises(DeviceMemoryError) as found, computing_on(GPU, "a step of 3 texts"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")
    assert str(found.value).startswith(
        "cuda:1 has no memory for a step of 3 texts (CUDA out of memory. Tried to allocate 2 GiB): keep fewer"
    )
    assert explained(found.value) == str(found.value), "clients hear of it as it is"
    for alive, kind in ((True, RuntimeError), (False, PartLostError)):
        monkeypatch.setattr(f"{place}.answers", lambda _, alive=alive: alive)
        with pytest.raises(kind) as raised, computing_on(GPU, "a step"):
            raise RuntimeError("CUDA error: an illegal memory access")
        assert isinstance(raised.value, PartLostError) is not alive
    with pytest.raises(torch.OutOfMemoryError), computing_on(torch.device("cpu"), "a step"):
        raise torch.OutOfMemoryError
    assert shown_device(torch.device("cpu")) == "the CPU"


def test_a_text_whose_growth_failed_on_the_way_grows_again_and_keeps_its_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    piece = TextKV(built("dense").spec, torch.float32)
    piece.grow(10)
    for tensor in (one for tensors in piece.layers.values() for one in tensors):
        tensor.normal_()
    before = {layer: tuple(one.clone() for one in tensors) for layer, tensors in piece.layers.items()}
    made, calls = torch.Tensor.new_zeros, [0]

    def failing(tensor: torch.Tensor, *shape: int) -> torch.Tensor:
        calls[0] += 1
        if calls[0] == 4:  # of the second layer
            raise torch.OutOfMemoryError
        return made(tensor, *shape)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "new_zeros", failing)
        with pytest.raises(torch.OutOfMemoryError):
            piece.grow(600)
    piece.grow(600)
    assert piece.capacity >= 600
    for layer, tensors in piece.layers.items():
        for one, old in zip(tensors, before[layer], strict=True):
            assert torch.equal(one[:, :512], old)
            assert not one[:, 512:].any()
