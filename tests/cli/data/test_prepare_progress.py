"""Progress of a preparation in words."""

import pytest

from phalanx.cli.data.report import in_words


@pytest.mark.parametrize(
    ("done", "in_all", "elapsed_s", "words"),
    [
        (1_200_000_000, 4_000_000_000, 34.3, "1.2 of 4.0 GB, 35 MB/s, 80 s left"),
        (4_000_000_000, 4_000_000_000, 100.0, "4.0 of 4.0 GB, 40 MB/s"),
        (10_000_000, 9_000_000_000, 10.0, "0.0 of 9.0 GB, 1.0 MB/s, 2.5 h left"),
        (0, 5_000, 9.0, "0.0 of 5.0 kB"),
        (3, 7, 0.1, "3 of 7 bytes"),
        (0, 0, 3.0, "0 of 0 bytes"),
    ],
)
def test_bytes_rate_and_time_left_are_said(done: int, in_all: int, elapsed_s: float, words: str) -> None:
    assert in_words(done, in_all, elapsed_s) == words
