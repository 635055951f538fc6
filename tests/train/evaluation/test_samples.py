"""Samples are the same text on every layout and through a stop."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch

from model.initialized import initialized
from phalanx.data.tokenizers.tokenizer import BytesTokenizer
from phalanx.observe.event_log import read_events
from phalanx.observe.events import Sampled
from phalanx.run.directory.paths import RunDirectory, step_folder
from phalanx.run.sections.monitoring import EvalSpec, PromptSpec, evaluation_problems
from phalanx.run.spec import RunSpec
from phalanx.train.evaluation.scoring import Score, continue_prompts
from phalanx.train.evaluation.tasks import Prompt, SequenceScore
from ranks import Ranks
from run.specs import replace_at
from tiny_runs import on_layout, tiny_run, train_on_this_rank
from train.evaluation.test_scoring import LAYOUTS
from train.pieces import divided, model_in, run_in_pieces

SAMPLES = (
    PromptSpec("greedy", "a word", 9),
    PromptSpec("hot", "a word", 7, 1.5),
    PromptSpec("cold", "a word", 7, 0.01),
    PromptSpec("empty", "", 5),
    PromptSpec("long", "some words " * 40, 4),
)


def with_samples(spec: RunSpec) -> RunSpec:
    return replace_at(spec, "evaluation.samples", SAMPLES)


def sampled(run_dir: str | Path) -> list[Sampled]:
    bodies = [event.body for event in read_events(Path(run_dir) / "events.jsonl")]
    return [body for body in bodies if isinstance(body, Sampled)]


def score_by_initial_weights(spec: RunSpec) -> Score:
    """Scores by the run's initial weights, on this rank of the process group."""
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
    return lambda sequences, noise: score_sequences(built.model, built.runner, spec, sequences, noise=noise)


def texts_on_this_rank(spec: RunSpec) -> list[list[int]]:
    """Tokens after some prompts by the run's initial weights, on this rank of the process group."""
    vocabulary = spec.model.vocab_size
    prompts = [
        Prompt(tuple((7 * n + m) % vocabulary for m in range(1 + 2 * n)), 6, 0.7 * (n % 2), (n,))
        for n in range(7)
    ]
    score = score_by_initial_weights(spec)
    texts = continue_prompts(prompts, score, BytesTokenizer(), spec.train.seq_len, vocabulary)
    return [text.tokens for text in texts]


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_writes_the_same_text(ranks: Ranks, name: str) -> None:
    pieces, model, count, degrees = LAYOUTS[name]
    spec = run_in_pieces(model_in(pieces, model))
    (alone,) = ranks.run(1, texts_on_this_rank, spec)
    parallel = divided(spec.model, **degrees)
    for texts in ranks.run(count, texts_on_this_rank, dataclasses.replace(spec, parallel=parallel)):
        assert texts == alone


def test_greedy_text_is_that_of_the_whole_model(ranks: Ranks) -> None:
    spec = replace_at(run_in_pieces(model_in("whole", "shared key heads")), "model.init_std", 0.3)
    (texts,) = ranks.run(1, texts_on_this_rank, spec)
    model = initialized(spec.model, seed=spec.runtime.seed)
    for n in (0, 2, 4, 6):
        tokens = [(7 * n + m) % spec.model.vocab_size for m in range(1 + 2 * n)]
        for token in texts[n]:
            assert token == int(model(torch.tensor([tokens]))[0, -1].argmax())
            tokens.append(token)


def test_a_text_ends_at_the_end_of_the_document_and_has_only_tokens_of_the_tokenizer() -> None:
    logits = torch.zeros(300)
    logits[[299, 256, 65]] = torch.tensor([3.0, 2.0, 1.0])

    def score(_sequences: object, noise: torch.Tensor | None) -> list[SequenceScore]:
        assert noise is not None
        return [SequenceScore((0.0,), (int((logits + row).argmax()),), is_greedy=False) for row in noise]

    prompts = [Prompt((1,), 4), Prompt((2,), 3)]
    texts = continue_prompts(prompts, score, BytesTokenizer(), 16, 300)
    assert [text.tokens for text in texts] == [[256], [256]]


def test_a_sample_has_the_probabilities_of_its_temperature() -> None:
    logits = torch.tensor([0.0, 1.0, -1.0, 0.5])

    def score(_sequences: object, noise: torch.Tensor | None) -> list[SequenceScore]:
        assert noise is not None
        return [SequenceScore((0.0,), (int((logits + row[:4]).argmax()),), is_greedy=False) for row in noise]

    count = 4000
    (text,) = continue_prompts([Prompt((1,), count, 2.0, (3,))], score, BytesTokenizer(), 16, 257)
    shares = torch.bincount(torch.tensor(text.tokens), minlength=4) / count
    assert torch.allclose(shares, (logits / 2).softmax(0), atol=0.03)


def test_a_run_writes_its_samples_at_each_evaluation_with_one_text_on_any_layout(
    ranks: Ranks, dataset: Path, tmp_path: Path
) -> None:
    alone = with_samples(tiny_run(dataset, tmp_path / "alone"))
    (result,) = ranks.run(1, train_on_this_rank, alone)
    other = on_layout(dataclasses.replace(alone, run_dir=str(tmp_path / "four")), "zero2", 2)
    (sharded, *_) = ranks.run(4, train_on_this_rank, other)
    plain = tiny_run(dataset, tmp_path / "plain")
    (without,) = ranks.run(1, train_on_this_rank, plain)
    events = sampled(tmp_path / "alone")
    assert [(event.step, event.sample) for event in events] == [
        (step, sample.name) for step in (2, 4, 6) for sample in SAMPLES
    ]
    assert all(0 < len(event.tokens) <= 9 for event in events)
    assert sampled(tmp_path / "four") == events
    assert result["weights_sha256"] == sharded["weights_sha256"] == without["weights_sha256"]


def test_a_run_that_is_stopped_writes_the_texts_of_one_that_is_not(
    ranks: Ranks, dataset: Path, tmp_path: Path
) -> None:
    unbroken = with_samples(tiny_run(dataset, tmp_path / "whole"))
    ranks.run(1, train_on_this_rank, unbroken)
    broken = dataclasses.replace(unbroken, run_dir=str(tmp_path / "broken"))
    ranks.run(2, train_on_this_rank, broken, 3)
    ranks.run(1, train_on_this_rank, broken)
    assert set(map(str, sampled(tmp_path / "broken"))) == set(map(str, sampled(tmp_path / "whole")))


def test_a_run_that_lost_steps_writes_the_same_texts_again(
    ranks: Ranks, dataset: Path, tmp_path: Path
) -> None:
    killed = with_samples(tiny_run(dataset, tmp_path / "killed"))
    ranks.run(2, train_on_this_rank, killed, 5)
    before = sampled(tmp_path / "killed")
    directory = RunDirectory(tmp_path / "killed")
    for step in directory.committed_steps()[1:]:  # as if the run had been killed before these were durable
        shutil.rmtree(step_folder(directory.checkpoints, step))
    ranks.run(1, train_on_this_rank, killed)
    again = [event for event in sampled(tmp_path / "killed")[len(before) :] if event.step == 4]
    assert len(again) == len(SAMPLES)
    assert again == [event for event in before if event.step == 4]


def test_impossible_samples_are_refused_with_their_field() -> None:
    samples = (PromptSpec("a", tokens=17), PromptSpec("a"), PromptSpec("b/c"))
    problems = list(evaluation_problems(EvalSpec(samples=samples), 64))
    assert [problem.path for problem in problems] == [
        "evaluation.samples[1].name",
        "evaluation.samples[2].name",
    ]
    (problem,) = evaluation_problems(EvalSpec(samples=samples[:1]), 16)
    assert problem.path == "evaluation.samples[0].tokens"
