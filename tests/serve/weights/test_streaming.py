"""Streamed models: the bits of the resident ones, in less memory, whatever the disk does."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from open_files import descriptors_of
from phalanx.checkpoint.format.errors import CorruptError, MismatchError
from phalanx.checkpoint.pack.layout import PackFormat
from phalanx.checkpoint.pack.reader import PackFile, open_pack
from phalanx.checkpoint.pack.writer import pack
from phalanx.model.layers.expert_groups import Groups, grouped_product
from phalanx.model.layers.moe import Experts
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import ModelSpec
from phalanx.train.score import Compute, Scorer
from phalanx_serve.generate import generate, load_model
from phalanx_serve.weights.budget import TooLargeError, divide_memory
from phalanx_serve.weights.open_model import empty_model, open_model, packed, scorer_of, stream_weights
from phalanx_serve.weights.streamed import streamed_weights
from serve.packed_runs import DENSE, MIXTURE, MODELS, make_pack, make_run

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LONG, SHORT = torch.arange(40)[None] * 7 % 64, torch.tensor([[5]])


def least(path: Path, dtype: torch.dtype) -> int:
    """The least memory that streaming a pack works in."""
    name = next(name for name, one in DTYPES.items() if one == dtype)
    index = open_pack(path).index
    low, high = 0, 1 << 30
    while high - low > 1:
        middle = (low + high) // 2
        try:
            divide_memory(index, name, middle)
            high = middle
        except TooLargeError:
            low = middle
    return high


@torch.no_grad()
def passes(model: nn.Module) -> list[Tensor]:
    return [model(tokens).clone() for tokens in (LONG, SHORT, LONG[:, :9], SHORT)]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        ("fp32", "float32"),
        ("bf16", "bfloat16"),
        ("int8", "bfloat16"),
        ("fp8", "float32"),
        ("bf16", "float32"),
    ],
)
@pytest.mark.parametrize("room", [1.0, 1.3])
def test_a_streamed_model_has_the_bits_of_the_resident_one(
    tmp_path: Path, kind: str, form: PackFormat, dtype: str, room: float
) -> None:
    path, compute = make_pack(tmp_path, MODELS[kind], form), DTYPES[dtype]
    resident, _ = open_model(path, dtype=compute)
    streamed, _ = open_model(path, stream=True, memory_bytes=int(least(path, compute) * room), dtype=compute)
    assert all(torch.equal(a, b) for a, b in zip(passes(streamed), passes(resident), strict=True))
    weights = streamed_weights(streamed)
    assert weights is not None
    assert weights.statistics.bytes_read > 0
    texts = [
        list(generate(model, [1, 2, 3], tokens=8, seed=3, numerics="exact")) for model in (resident, streamed)
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_pack_in_the_dtype_computed_with_gives_what_the_checkpoint_gives(
    tmp_path: Path, dtype: str
) -> None:
    run = make_run(tmp_path / "run", MIXTURE)
    loaded, _ = load_model(run, dtype=DTYPES[dtype])
    streamed, _ = open_model(run, stream=True, memory_bytes=1 << 20, dtype=DTYPES[dtype])
    assert all(torch.equal(a, b) for a, b in zip(passes(streamed), passes(loaded), strict=True))


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_a_mixture_is_scored_by_the_bits_of_the_run_while_its_experts_come_and_go(
    tmp_path: Path, compute: Compute
) -> None:
    run = make_run(tmp_path / "run", MIXTURE, seq_len=48)
    texts = [[1, 2, 3, 4], [5, 1], list(range(40))]
    expected = Scorer.of_run(run, None, compute).score(texts)
    ample = scorer_of(run, None, compute, stream=True, memory_bytes=None)
    file = packed(run, None, ample.dtype)
    model, _ = empty_model(file.index, ample.dtype, 48)
    streamed = stream_weights(model, file, least(file.path, ample.dtype), ample.dtype)
    for scorer in (ample, Scorer(ample.spec, model)):
        assert all(torch.equal(a, b) for a, b in zip(scorer.score(texts), expected, strict=True))
    assert streamed.statistics.expert_misses > 0


def test_a_product_that_is_exchanged_after_opening_is_the_one_that_multiplies(tmp_path: Path) -> None:
    path, seen = make_pack(tmp_path, MIXTURE, "fp32"), []

    def product(rows: Tensor, matrices: Tensor, groups: Groups) -> Tensor:
        seen.append(len(rows))
        return grouped_product(rows, matrices, groups)

    streamed, _ = open_model(path, stream=True, memory_bytes=least(path, torch.float32))
    for part in streamed.modules():
        if isinstance(part, Experts):
            part.product = product
    passes(streamed)
    assert sum(seen) == 3 * 2 * 4 * (40 + 1 + 9 + 1)  # matrices, experts of a token, mixtures, tokens


def test_a_pass_that_was_broken_off_does_not_disturb_the_next(tmp_path: Path) -> None:
    path = make_pack(tmp_path, DENSE, "fp32")
    streamed, _ = open_model(path, stream=True, memory_bytes=least(path, torch.float32))
    expected = passes(streamed)

    def fail(*_: object) -> None:
        raise RuntimeError("broken off")

    hook = streamed.blocks["2"].attention.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="broken off"):
        passes(streamed)
    hook.remove()
    assert all(torch.equal(a, b) for a, b in zip(passes(streamed), expected, strict=True))


def test_a_damaged_chunk_ends_the_pass_with_its_name(tmp_path: Path) -> None:
    path = make_pack(tmp_path, DENSE, "fp32")
    streamed, _ = open_model(path, stream=True, memory_bytes=least(path, torch.float32))
    section = next(one for one in open_pack(path).index.sections if one.layer == 4)
    with path.open("r+b") as file:
        file.seek(section.start + 3)
        file.write(b"\xff")
        file.flush()
        os.fsync(file.fileno())
    with pytest.raises(CorruptError, match=r"layer 4, chunk 0 .*written to since it was opened"):
        passes(streamed)


def test_a_file_that_ends_while_it_is_served_ends_the_pass_with_its_name(tmp_path: Path) -> None:
    path = make_pack(tmp_path, DENSE, "fp32")
    streamed, _ = open_model(path, stream=True, memory_bytes=least(path, torch.float32))
    os.truncate(path, next(one for one in open_pack(path).index.sections if one.layer == 3).start)
    with pytest.raises(CorruptError, match="the file ends within it"):
        passes(streamed)


def test_a_file_put_in_the_place_of_the_one_served_changes_nothing(tmp_path: Path) -> None:
    path = make_pack(tmp_path, DENSE, "fp32")
    other = tmp_path / "other"
    other.mkdir()
    streamed, _ = open_model(path, stream=True, memory_bytes=least(path, torch.float32))
    expected = passes(streamed)
    shutil.copy(path, other / "copy")
    os.replace(make_pack(other, MIXTURE, "fp32"), path)
    assert all(torch.equal(a, b) for a, b in zip(passes(streamed), expected, strict=True))


def test_a_slow_disk_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_pack(tmp_path, MIXTURE, "fp32")
    expected = passes(open_model(path)[0])
    read = PackFile.read_chunks

    def slow(*arguments: object) -> None:
        time.sleep(0.002)
        read(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(PackFile, "read_chunks", slow)
    streamed, _ = open_model(path, stream=True, memory_bytes=least(path, torch.float32))
    assert all(torch.equal(a, b) for a, b in zip(passes(streamed), expected, strict=True))
    weights = streamed_weights(streamed)
    assert weights is not None
    assert sum(weights.statistics.stall_s.values()) > 0


def test_a_pack_of_another_step_or_of_other_weights_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", DENSE, (1, 2))
    open_model(run, stream=True, step=1)
    with pytest.raises(MismatchError, match="step 1, not 2"):
        open_model(run / "packs" / "step-00000001-fp32.pack", step=2)


def test_a_refused_pack_is_closed(tmp_path: Path) -> None:
    path = make_pack(tmp_path, DENSE, "fp32")
    with pytest.raises(MismatchError):
        open_model(path, step=7)
    gc.collect()  # the error's frames
    assert descriptors_of(path) == set()


def test_a_model_whose_resident_weights_cannot_be_read_leaves_no_thread(tmp_path: Path) -> None:
    path = make_pack(tmp_path, DENSE, "fp32")
    section = next(entry for entry in open_pack(path).index.sections if entry.kind == "embedding")
    with path.open("r+b") as file:
        file.seek(section.start)
        file.write(b"\xff\xff\xff")
    before = set(threading.enumerate())
    with pytest.raises(CorruptError):
        open_model(path, stream=True, memory_bytes=least(path, torch.float32))
    assert set(threading.enumerate()) <= before


def test_a_runs_pack_that_is_of_another_step_or_model_by_its_content_is_refused(tmp_path: Path) -> None:
    run, other = make_run(tmp_path / "run", DENSE, (1, 3)), make_run(tmp_path / "other", MIXTURE, (3,))
    packs = run / "packs"
    first = open_model(run, stream=True, step=1)[0]
    first_pack = next(packs.iterdir())
    name = first_pack.name.replace("00000001", "00000003")
    for source, problem in (
        (first_pack, "is a pack of step 1, under the name of step 3"),
        (pack(other, 3, tmp_path / "other.pack", "fp32")[0], "holds another model than this run's"),
    ):
        shutil.copy(source, packs / name)
        with pytest.raises(MismatchError, match=f"{problem}; remove it"):
            open_model(run, stream=True, step=3)
        (packs / name).unlink()
    third = open_model(run, stream=True)[0]
    assert not torch.equal(first(SHORT), third(SHORT))
    assert (packs / name).exists()
    shutil.copy(first_pack, packs / name)
    shutil.rmtree(run / "checkpoints" / "step-00000003")  # retention has deleted it
    with pytest.raises(MismatchError, match=r"give a step that is there \(1\): .* it cannot be packed again"):
        open_model(run, stream=True, step=3)


def test_too_little_memory_is_refused_with_what_would_do(tmp_path: Path) -> None:
    path = make_pack(tmp_path, DENSE, "fp32")
    needed = least(path, torch.float32)
    with pytest.raises(TooLargeError, match=f"needs {needed:,} bytes"):
        open_model(path, stream=True, memory_bytes=needed - 1)
    with pytest.raises(TooLargeError, match="--stream"):
        open_model(path, memory_bytes=needed)


CAPPED = """
import resource, sys
from pathlib import Path
import torch
from phalanx_serve.generate import generate
from phalanx_serve.weights.open_model import empty_model, open_model, packed, stream_weights
path, way = Path(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
if way != "free":
    resource.setrlimit(resource.RLIMIT_AS, (used + (150 << 20), used + (150 << 20)))
if way == "unasked":
    model, _ = open_model(path, memory_bytes=1 << 40)
elif way == "streamed":
    model, _ = open_model(path, stream=True, memory_bytes=70 << 20)
else:
    model, _ = open_model(path)
print(list(generate(model, [1, 2, 3], tokens=3, temperature=0)))
"""


@pytest.mark.slow
def test_a_model_larger_than_the_memory_that_a_process_may_have_gives_the_same_tokens(tmp_path: Path) -> None:
    # 12 layers of 17 MB: 202 MB, where 150 MiB can be had.
    spec = resolve(ModelSpec(layers=12, dim=512, heads=8, kv_heads=8, ffn_dim=2048, vocab_size=64))
    path = make_pack(tmp_path, spec, "fp32")

    def run(way: str) -> subprocess.CompletedProcess[str]:
        # One heap: each thread's own would reserve addresses that it never uses.
        environment = {**os.environ, "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}
        words = [sys.executable, "-c", CAPPED, str(path), way]
        return subprocess.run(words, env=environment, capture_output=True, text=True, check=False)

    free, streamed = run("free"), run("streamed")
    assert streamed.returncode == 0, streamed.stderr
    assert streamed.stdout == free.stdout
    resident = run("resident")
    assert resident.returncode != 0
    assert "its weights take" in resident.stderr
    assert run("unasked").returncode != 0
