"""The first start on a machine, which knows nothing of its kernels, by real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from parity.llama3_folder import save_llama3
from phalanx.checkpoint.interop.huggingface.import_folder import import_hf
from serve.workers.services import service

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
"""Four times a model is opened by a server, or by its workers and stages."""


def test_a_first_start_says_that_kernels_are_tried_and_the_next_one_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_llama3(tmp_path / "llama3")
    import_hf(tmp_path / "llama3", tmp_path / "run")
    for number, options in enumerate(([], ["--workers", "1"])):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"cache-{number}"))
        trials = []
        for _ in range(2):
            with (
                service(tmp_path / "run", "--threads", "1", *options)
                if options
                else service(tmp_path / "run") as one
            ):
                events = [line for line in one.lines if line["event"] in ("numerics-trial", "listening")]
            assert events[-1]["event"] == "listening"
            trials.append(events[:-1])
        assert {trial["kept"] for trial in trials[0]} == {str(tmp_path / f"cache-{number}/phalanx/numerics")}
        assert trials[1] == []
    assert [trial["worker"] for trial in trials[0]] == [0]
