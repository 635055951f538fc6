"""The first failure is distinguished from those that it caused, also if the clocks of machines differ."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from phalanx.observe.logs.line import LogLine, comes_of_another, ended_text, first_failure, what_happened

TRACE = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\n'
OWN = f"{TRACE}ValueError: bad luck"
OF_ANOTHER = (
    f"{TRACE}RuntimeError: [../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:29574. GLHF!",
    f"{TRACE}RuntimeError: [gloo/pair.cc:537] Read error [::1]:6032: Connection reset by peer",
    f"{TRACE}torch.distributed.DistBackendError: NCCL communicator was aborted on rank 3.",
    f"{TRACE}torch.distributed.DistBackendError: NCCL error in: x.cpp:12, remote process exited or there was a network error",
    f"{TRACE}BrokenPipeError: [Errno 32] Broken pipe",
    "error: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5)",
    ended_text("was killed by SIGTERM"),
)


def line(t: float, rank: int, text: str) -> LogLine:
    return LogLine(t, "error", f"node-{rank}", rank, 0, 0, 7, text, f"rank-{rank:05d}")


@given(
    st.integers(0, 7),
    st.lists(st.tuples(st.sampled_from(OF_ANOTHER), st.floats(-5, 5)), min_size=8, max_size=8),
    st.randoms(use_true_random=False),
)
def test_an_error_of_its_own_comes_before_any_loss_of_a_peer(culprit, others, random) -> None:  # type: ignore[no-untyped-def]
    lines = [line(100.0 + skew, rank, text) for rank, (text, skew) in enumerate(others) if rank != culprit]
    lines += [line(101.0, rank, ended_text("ended with code 1")) for rank in range(8)]
    lines.append(line(100.0, culprit, OWN))
    random.shuffle(lines)
    failure = first_failure(lines)
    assert failure is not None
    assert failure.line.rank == culprit
    assert len(failure.followers) == 7
    assert failure.evidence[0] == "its error does not come of losing another process"


def test_a_process_that_was_killed_without_a_word_is_named_by_its_end() -> None:
    lines = [
        line(1.0, 0, OF_ANOTHER[0]),
        line(1.2, 2, OF_ANOTHER[1]),
        line(11.0, 1, ended_text("was killed by SIGKILL")),
    ]
    failure = first_failure(lines)
    assert failure is not None
    assert failure.line.rank == 1


def test_where_all_lost_somebody_the_earliest_is_named_and_that_it_is_a_guess() -> None:
    failure = first_failure([line(2.0, 0, OF_ANOTHER[0]), line(1.0, 1, OF_ANOTHER[1])])
    assert failure is not None
    assert failure.line.rank == 1
    assert "its cause has left no word" in failure.evidence[0]


def test_the_first_exception_of_a_chain_decides() -> None:
    chain = f"{OWN}\n\nDuring handling of the above exception, another exception occurred:\n\n{OF_ANOTHER[0]}"
    assert not comes_of_another(chain)
    assert what_happened(chain) == "ValueError: bad luck"


def test_only_the_newest_burst_counts() -> None:
    failure = first_failure([line(0.0, 5, OWN), line(1000.0, 3, OWN), line(1000.1, 2, OF_ANOTHER[0])])
    assert failure is not None
    assert (failure.line.rank, len(failure.followers)) == (3, 1)
    assert first_failure([]) is None
