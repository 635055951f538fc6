"""No stream reads or writes what another one still writes, and the detector finds such a race where a fence is left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from null_gpu.programs import printed

KINDS = (
    *("dense", "ZeRO-3", "recompute full", "muon", "moments in int8", "integer sums", "fast sums"),
    *("activations in host", "activations in file", "moments in host", "experts on two ranks"),
)


@pytest.mark.timeout(1800)
def test_steps_and_a_snapshot_have_no_race(tmp_path: Path) -> None:
    assert printed("streams", "fence", str(tmp_path), *KINDS) == [f"{name}: 0" for name in KINDS]


def test_a_snapshot_that_the_update_does_not_wait_for_is_a_race(tmp_path: Path) -> None:
    (line,) = printed("streams", "no-fence", str(tmp_path), "dense")
    assert line != "dense: 0"
