"""What the goodput bench counts, and that it ends all processes of a server."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bench.beside import goodput as bench
from phalanx_process import alive

LOAD = bench.Load(rate=1.0, requests=4, ttft_s=1.0, tpot_s=0.1)


def test_requests_within_both_objectives_count() -> None:
    found = bench.LoadResult([(0.5, 0.05), (1.0, 0.1), (1.1, 0.05), (0.5, 0.2)], 0, 4.0)
    assert found.goodput(LOAD) == 0.5
    assert "goodput 0.500 of 1.000 requests/s, 4 answered, 0 failed" in bench.line("ours", found, LOAD)


def test_a_side_that_answered_nothing_has_a_line_too() -> None:
    nothing = bench.LoadResult([], 4, 2.0)
    assert nothing.goodput(LOAD) == 0
    assert bench.line("vLLM", nothing, LOAD) == "  vLLM: goodput 0, none answered, 4 failed"


VLLM = {
    "duration": 4.0,
    "output_lens": [32, 0, 32],
    "ttfts": [0.5, 0.0, 0.6],
    "itls": [[0.1] * 31, [], [0.2] * 31],
    "errors": ["", "refused", ""],
}


def guidellm(*lengths: int | None) -> dict[str, Any]:
    times = {"time_to_first_token_ms": 500.0, "inter_token_latency_ms": 100.0}
    told = [{"output_tokens": length, **times} for length in lengths]
    return {"duration": 4.0, "requests": {"successful": told, "errored": [{}], "incomplete": []}}


def test_what_the_load_programs_write_is_read() -> None:
    by_vllm, by_guidellm = bench.of_vllm(VLLM, LOAD), bench.of_guidellm(guidellm(32, 32))
    assert by_vllm.answered == [pytest.approx((0.5, 0.1)), pytest.approx((0.6, 0.2))]
    assert by_guidellm.answered == [(0.5, 0.1)] * 2
    assert (by_vllm.failed, by_guidellm.failed) == (2, 1)


def test_answers_of_another_length_than_was_asked_for_end_the_bench() -> None:
    with pytest.raises(SystemExit, match=r"1 of 2 answers have not the 32 tokens .*'31'"):
        bench.of_vllm(VLLM | {"output_lens": [31, 0, 32]}, LOAD)
    for length, said in ((33, "'33'"), (None, "'None'")):
        with pytest.raises(SystemExit, match=f"1 of 3 answers .*{said}"):
            bench.of_guidellm(guidellm(32, length, 32))


def test_a_servers_own_processes_end_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "child"
    program = (
        "import pathlib, subprocess, time; child = subprocess.Popen(['sleep', '60']); "
        f"pathlib.Path({str(told)!r}).write_text(f'{{child.pid}} '); time.sleep(60)"
    )
    monkeypatch.setattr(bench, "is_healthy", lambda _: told.exists() and told.read_text().endswith(" "))
    with bench.server("a server", [sys.executable, "-c", program], 1, tmp_path / "log", 1):
        child = int(told.read_text())
        assert alive(child)
    deadline = time.monotonic() + 20
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive(child)
