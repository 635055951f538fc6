"""What is told of a dataset that one process has prepared: what was read as what, what was left out, and what there is to train on."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import click

from phalanx.cli.data.named import say_array
from phalanx.cli.data.notices import lines_of_links, lines_of_overlap, lines_of_turns
from phalanx.run.sections.train import TrainSpec

if TYPE_CHECKING:
    from phalanx.data.preparing.files import Files
    from phalanx.data.preparing.prepare import PreparedInfo
    from phalanx.data.stored.index import DatasetIndex

_MUCH_PADDING = 0.01


def report_prepared(
    out: str, info: PreparedInfo, files: Files | None, *, on_bad: Literal["stop", "skip"], as_json: bool
) -> None:
    """Print what became of ``files``, or of a known corpus, in the dataset at ``out``."""
    if files is not None:
        _show_left_out(files)
        for path in files.arrays():
            say_array(path)
    if as_json:
        click.echo(json.dumps(_facts(out, info, files)))
        return
    click.echo(f"{out}: {'was there already' if info.reused else 'written'}")
    for line in _lines_of_files(files):
        click.echo(f"  {line}")
    for line in _lines_of_tokens(info.index, on_bad):
        click.echo(f"  {line}")
    for line in lines_of_overlap(info.held_out_in_training, info.index, "--hold-out-by text"):
        click.echo(f"  {line}")
    for line in lines_of_turns(out, info.index):
        click.echo(f"  {line}")
    if files is not None and files.report.bad_count:
        click.echo(f"  left out as bad: {files.report.bad_count:,}, named above")
    click.echo(f"  vocabulary {info.vocab_size:,}; fingerprint {info.fingerprint[:16]}")


def _facts(out: str, info: PreparedInfo, files: Files | None) -> dict[str, object]:
    train = info.index.train
    return {
        "path": out,
        "reused": info.reused,
        "vocab_size": info.vocab_size,
        "train_tokens": train.tokens,
        "held_out_tokens": info.index.held_out.tokens,
        "held_out_in_training": info.held_out_in_training,
        "xz_bits_per_byte": info.held_out_xz_bits_per_byte,
        "fingerprint": info.fingerprint,
        "padding": train.padding / max(1, train.tokens),
        **_chat_facts(info.index),
        **_read_facts(files),
    }


def _lines_of_files(files: Files | None) -> Iterator[str]:
    if files is None:
        return
    yield what_was_read(files)
    if files.report.without_text:
        yield f"without text: {_count(files.report.without_text, 'document')}"
    if files.aside:
        more = f" and {len(files.aside) - 3} more" if len(files.aside) > 3 else ""
        yield f"not read, since they describe data beside them: {', '.join(map(str, files.aside[:3]))}{more}"
    yield from lines_of_links(files.linked)


def _lines_of_tokens(index: DatasetIndex, on_bad: Literal["stop", "skip"]) -> Iterator[str]:
    train, held_out = index.train, index.held_out
    yield f"{train.tokens:,} tokens to train on, {held_out.tokens:,} held out"
    if train.tokens <= TrainSpec.seq_len:
        yield f"warning: that is less than one sequence of train.seq_len = {TrainSpec.seq_len}: give more text, or train on shorter sequences"
    if index.packed_seq_len:
        share = train.padding / max(1, train.tokens)
        few = "; documents are too few to fill them better" if share > _MUCH_PADDING else ""
        yield f"packed whole into records of {index.packed_seq_len:,} tokens, {share:.3%} of them padding{few}"
    if index.recipe.chat is not None:
        yield f"{_count(train.documents, 'conversation')} to train on, {train.learned / max(1, train.tokens):.1%} of their tokens learned"
        if left_out := train.left_out + held_out.left_out:
            total = left_out + train.documents + held_out.documents
            reason = f"{'bad or ' if on_bad == 'skip' else ''}longer than a record of {index.packed_seq_len:,} tokens"
            yield f"warning: {left_out:,} of {_count(total, 'conversation')} left out, being {reason}: a larger --seq-len or --too-long cut keeps long ones"


def _chat_facts(index: DatasetIndex) -> dict[str, object]:
    if index.recipe.chat is None:
        return {}
    both = (index.train, index.held_out)
    return {
        "conversations": sum(split.documents for split in both),
        "learned_tokens": sum(split.learned for split in both),
        "left_out_conversations": sum(split.left_out for split in both),
    }


def what_was_read(files: Files) -> str:
    """Such as "3 files: 1 jsonl (12,031 documents), 1 parquet (8,000 documents), 1 text (1 document)"."""
    by_format = Counter(str(file.format) for file in files.files)
    parts = (
        f"{count:,} {form} ({_count(files.report.documents[form], 'document')})"
        for form, count in sorted(by_format.items())
    )
    return f"{_count(len(files.files), 'file')}: {', '.join(parts)}"


def _read_facts(files: Files | None) -> dict[str, object]:
    if files is None:
        return {"left_out": [], "left_out_count": 0}
    by_format = Counter(str(file.format) for file in files.files)
    report = files.report
    return {
        "read": {
            form: {"files": count, "documents": report.documents[form]}
            for form, count in sorted(by_format.items())
        },
        "without_text": report.without_text,
        "not_read": [str(path) for path in (*files.aside, *files.linked)],
        "left_out": [f"{bad.path}, {bad.place}" if bad.place else str(bad.path) for bad in report.bad],
        "left_out_count": report.bad_count,
    }


def _show_left_out(files: Files) -> None:
    report = files.report
    for bad in report.bad:
        click.echo(f"left out: {bad}", err=True)
    if report.bad_count > len(report.bad):
        click.echo(f"left out: {report.bad_count - len(report.bad):,} more", err=True)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
