"""Scores of sequences are those of the whole model, and the same bits on every layout."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from model.initialized import initialized
from phalanx.observe.event_log import read_events
from phalanx.observe.events import TaskEvaluated
from phalanx.run.spec import ParallelSpec, RunSpec
from phalanx.train.evaluation.tasks import ScoredSequence, SequenceScore
from ranks import Ranks
from run.specs import replace_at
from tiny_runs import on_layout, tiny_run, train_on_this_rank
from train.evaluation.made_tasks import with_tasks
from train.pieces import divided, model_in, run_in_pieces

LAYOUTS: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "zero2": ("whole", "dense", 4, {"sharding": "zero2"}),
    "zero3": ("whole", "shared key heads", 2, {"sharding": "zero3"}),
    "a pipeline": ("whole", "four layers", 2, {"pipeline": 2}),
    "lanes over tensor ranks": ("lanes", "shared key heads", 2, {"tensor": 2}),
    "tiles over context ranks": ("tiles", "dense", 2, {"context": 2}),
    "lanes and tiles on four ranks": ("lanes and tiles", "dense", 4, {"tensor": 2, "context": 2}),
    "experts on two ranks": ("whole", "mixture", 2, {"expert": 2, "sharding": "zero2"}),
    "predictions ahead": ("whole", "ahead", 2, {"sharding": "zero2"}),
}
"""Pieces, model, ranks, and how they are used."""


def sequences(spec: RunSpec) -> list[ScoredSequence]:
    """Sequences of all lengths, with tokens that end documents among them."""
    generator = torch.Generator().manual_seed(5)
    vocabulary, seq_len = spec.model.vocab_size, spec.train.seq_len
    made = []
    for number in range(11):
        length = 2 + (number * 5) % seq_len
        tokens = torch.randint(vocabulary, (length,), generator=generator).tolist()
        made.append(ScoredSequence(tuple(tokens), 1 + number % (length - 1), number, 0))
    return made


def scores_on_this_rank(spec: RunSpec) -> list[SequenceScore]:
    """The scores by the run's initial weights, on this rank of the process group."""
    import torch.distributed as dist

    from phalanx.parallel.mesh import build_mesh
    from phalanx.train.assemble import make_deterministic
    from phalanx.train.compose import build_model
    from phalanx.train.evaluation.scoring import score_sequences
    from phalanx.train.step.state import fill_initial

    device = torch.device("cpu")
    make_deterministic(spec, device)
    mesh = build_mesh(spec, dist.get_world_size(), device)
    built = build_model(spec, mesh)
    fill_initial(built.model.parts, built.placement, spec)
    return score_sequences(built.model, built.runner, spec, sequences(spec))


@pytest.mark.parametrize("name", LAYOUTS)
def test_scores_have_the_same_bits_on_every_layout_and_every_rank(ranks: Ranks, name: str) -> None:
    pieces, model, count, degrees = LAYOUTS[name]
    spec = run_in_pieces(model_in(pieces, model))
    (alone,) = ranks.run(1, scores_on_this_rank, spec)
    parallel = divided(spec.model, **degrees)
    for scores in ranks.run(count, scores_on_this_rank, dataclasses.replace(spec, parallel=parallel)):
        assert scores == alone


def test_vocabulary_rows_on_several_ranks_give_the_same_choices_and_nearly_the_same_numbers(
    ranks: Ranks,
) -> None:
    spec = run_in_pieces(model_in("whole", "shared key heads"))
    (alone,) = ranks.run(1, scores_on_this_rank, spec)
    divided_spec = dataclasses.replace(spec, parallel=ParallelSpec(tensor=2))
    for scores in ranks.run(2, scores_on_this_rank, divided_spec):
        for score, expected in zip(scores, alone, strict=True):
            assert score.is_greedy == expected.is_greedy
            assert score.log_probabilities == pytest.approx(expected.log_probabilities, abs=1e-5)


def test_scores_are_the_log_probabilities_of_the_whole_model(ranks: Ranks) -> None:
    spec = run_in_pieces(model_in("whole", "shared key heads"))
    spec = replace_at(spec, "model.init_std", 0.3)
    (scores,) = ranks.run(1, scores_on_this_rank, spec)
    model = initialized(spec.model, seed=spec.runtime.seed)
    greedy = set()
    for sequence, score in zip(sequences(spec), scores, strict=True):
        logits = model(torch.tensor([sequence.tokens[:-1]]))[0].double()
        targets = torch.tensor(sequence.tokens[1:])
        log_probs = logits.log_softmax(-1).gather(1, targets[:, None])[-sequence.scored :, 0]
        assert score.log_probabilities == pytest.approx(log_probs.tolist(), abs=1e-4)
        right = (logits.argmax(-1) == targets)[-sequence.scored :]
        assert score.is_greedy == bool(right.all())
        greedy.add(score.is_greedy)


def task_events(run_dir: Path) -> list[tuple[object, ...]]:
    bodies = [event.body for event in read_events(run_dir / "events.jsonl")]
    return [
        (body.step, body.task, body.items, body.figures, body.sha256)
        for body in bodies
        if isinstance(body, TaskEvaluated)
    ]


def test_a_run_scores_its_tasks_at_each_evaluation_with_one_result_on_any_layout(
    ranks: Ranks, dataset: Path, tmp_path: Path
) -> None:
    alone = with_tasks(tiny_run(dataset, tmp_path / "alone"), tmp_path / "tasks")
    (result,) = ranks.run(1, train_on_this_rank, alone)
    other = on_layout(dataclasses.replace(alone, run_dir=str(tmp_path / "four")), "zero2", 2)
    results = ranks.run(4, train_on_this_rank, other)
    events = task_events(tmp_path / "alone")
    assert [event[:2] for event in events] == [
        (step, f"of-{kind}") for step in (2, 4, 6) for kind in ("choice", "completion", "text", "generation")
    ]
    assert task_events(tmp_path / "four") == events
    assert result["tasks"] == {event[1]: event[3] for event in events[-4:]} == results[0]["tasks"]


def test_a_run_continues_with_the_copies_of_its_tasks(ranks: Ranks, dataset: Path, tmp_path: Path) -> None:
    unbroken = with_tasks(tiny_run(dataset, tmp_path / "whole"), tmp_path / "tasks")
    ranks.run(1, train_on_this_rank, unbroken)
    broken = dataclasses.replace(unbroken, run_dir=str(tmp_path / "broken"))
    ranks.run(2, train_on_this_rank, broken, 4)
    for file in (tmp_path / "tasks").iterdir():
        file.unlink()
    ranks.run(2, train_on_this_rank, broken)
    assert set(map(str, task_events(tmp_path / "broken"))) == set(map(str, task_events(tmp_path / "whole")))


def test_tasks_change_no_bit_of_the_weights(ranks: Ranks, dataset: Path, tmp_path: Path) -> None:
    plain = tiny_run(dataset, tmp_path / "plain")
    (without,) = ranks.run(1, train_on_this_rank, plain)
    (with_them,) = ranks.run(
        1, train_on_this_rank, with_tasks(tiny_run(dataset, tmp_path / "run"), tmp_path / "tasks")
    )
    assert without["weights_sha256"] == with_them["weights_sha256"]
