"""Reports of a preparation: progress while it runs, and at its end the dataset and its sources, as lines or as one JSON object."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import click

from phalanx.run.sections.training import TrainSpec

if TYPE_CHECKING:
    from phalanx.data.formats.read import FileFormat
    from phalanx.data.preparing.files import Files
    from phalanx.data.preparing.prepare import PreparedDataset
    from phalanx.data.stored.index import DatasetIndex


_MUCH_PADDING = 0.01
_MOST_PATHS = 3


def report(
    out: str,
    dataset: PreparedDataset,
    lines: Iterable[str],
    facts: Mapping[str, object],
    *,
    by_recipe: bool,
    as_json: bool,
) -> None:
    """Print the contents of the dataset at ``out``, with ``lines`` on its sources; or one JSON object with
    ``facts``.

    ``by_recipe`` words the remedies for a recipe file instead of options.
    """
    index = dataset.index
    if as_json:
        totals = {
            "path": out,
            "reused": dataset.reused,
            "vocab_size": index.vocab_size,
            "train_tokens": index.train.tokens,
            "held_out_tokens": index.held_out.tokens,
            "held_out_in_training": dataset.held_out_in_training,
            "fingerprint": index.fingerprint,
            "padding": index.train.padding / max(1, index.train.tokens),
        }
        click.echo(json.dumps({**totals, **facts}))
        return
    click.echo(f"{out}: {'was there already' if dataset.reused else 'written'}")
    for line in (
        *lines,
        *_lines_of_tokens(index, by_recipe=by_recipe),
        *_lines_of_overlap(dataset, by_recipe=by_recipe),
        *_lines_of_turns(out, index),
    ):
        click.echo(f"  {line}")
    click.echo(f"  vocabulary {index.vocab_size:,}; fingerprint {index.fingerprint[:16]}")


def lines_of_counts(counts: Mapping[str, int]) -> Iterator[str]:
    """Yield lines on the documents that portions kept and dropped."""
    yield f"{counts['documents kept']:,} of {counts['documents read']:,} documents kept"
    for name, count in sorted(counts.items()):
        if name.startswith("dropped: "):
            yield f"  {name}: {count:,}"


def lines_of_files(formats: Iterable[FileFormat], files: Files) -> Iterator[str]:
    """Yield lines such as "3 files: 1 jsonl (12,031 documents), 2 parquet (8,000 documents)", and on documents
    without text, what was left out as bad, and files that were not read.
    """
    documents = files.report.documents
    by_format = Counter(map(str, formats))
    parts = (
        f"{count:,} {form}" + (f" ({in_number(documents[form], 'document')})" if documents else "")
        for form, count in sorted(by_format.items())
    )
    yield f"{in_number(by_format.total(), 'file')}: {', '.join(parts)}"
    if files.report.without_text:
        yield f"without text: {in_number(files.report.without_text, 'document')}"
    if files.report.bad_count:
        yield f"left out as bad: {files.report.bad_count:,}, named above"
    if files.aside:
        yield f"not read, since they describe data beside them: {_paths(files.aside)}"
    if files.linked:
        yield f"not read, since links to folders are not followed: {_paths(files.linked)}; name them to have them read"


def facts_of_files(formats: Iterable[FileFormat], files: Files) -> dict[str, object]:
    """Return for JSON: files and documents by format, paths that were not read, and what was left out as bad, with
    its number.
    """
    documents = files.report.documents
    return {
        "read": {
            form: {"files": count, **({"documents": documents[form]} if documents else {})}
            for form, count in sorted(Counter(map(str, formats)).items())
        },
        "not_read": [str(path) for path in (*files.aside, *files.linked)],
        "left_out": [f"{bad.path}, {bad.place}" if bad.place else str(bad.path) for bad in files.report.bad],
        "left_out_count": files.report.bad_count,
    }


def print_left_out(files: Files) -> None:
    """Print to standard error each bad file or row that was left out, beyond a limit only their number, and the
    remedy for files that are one JSON array.
    """
    report = files.report
    for bad in report.bad:
        click.echo(f"left out: {bad}", err=True)
    if report.bad_count > len(report.bad):
        click.echo(f"left out: {report.bad_count - len(report.bad):,} more", err=True)
    for path in files.arrays():
        click.echo(
            f"note: {path} is one JSON array, read as the text that it is; for its rows: jq -c '.[]' {path} > rows.jsonl",
            err=True,
        )


def in_number(number: int, noun: str) -> str:
    """Return a number with its noun, such as "1 file", "2 files"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _paths(paths: Sequence[Path]) -> str:
    more = f" and {len(paths) - _MOST_PATHS} more" if len(paths) > _MOST_PATHS else ""
    return ", ".join(map(str, paths[:_MOST_PATHS])) + more


def _lines_of_tokens(index: DatasetIndex, *, by_recipe: bool) -> Iterator[str]:
    """Yield lines on the tokens of each split and the padding.

    Warn of less than one sequence to train on, much padding, or nothing held out; ``by_recipe`` words the remedies.
    """
    train, held_out = index.train, index.held_out
    yield f"{train.tokens:,} tokens to train on, {held_out.tokens:,} held out"
    # A record of packed documents is a full sequence; in a stream, a sequence needs one more token, its last target.
    if train.tokens < (index.packed_seq_len or TrainSpec.seq_len + 1):
        seq_len = index.packed_seq_len or TrainSpec.seq_len
        yield f"warning: that is less than one sequence of train.seq_len = {seq_len}: give more text, or train on shorter sequences"
    if index.packed_seq_len:
        share, few = train.padding / max(1, train.tokens), ""
        # The last record of the stream is short for want of documents alone.
        if share > _MUCH_PADDING and train.padding >= index.packed_seq_len:
            few = "; documents are few, or their lengths do not fit together"
            if by_recipe:
                few = "; a portion has too few documents to fill them better: a larger output.portion_bytes, with another --out, helps"
        yield f"packed whole into records of {index.packed_seq_len:,} tokens, {share:.3%} of them padding{few}"
    if not held_out.tokens:
        yield "nothing is held out, so there will be no held-out loss: raise output.held_out with another --out"


def _lines_of_overlap(dataset: PreparedDataset, *, by_recipe: bool) -> Iterator[str]:
    """Yield a line on how many held-out documents are also in the training split, and how to avoid it.

    Nothing if that was not counted or none are held out.
    """
    shared, documents = dataset.held_out_in_training, dataset.index.held_out.documents
    if shared is None or not documents:
        return
    also = ""
    if shared and dataset.index.recipe.hold_out_by == "name":
        remedy = 'output.hold_out_by = "text"' if by_recipe else "--hold-out-by text"
        also = f"; with {remedy}, and another --out, all copies of a text are in one split"
    yield f"{shared:,} of {documents:,} held-out documents are in the training split too, word for word{also}"


def _lines_of_turns(out: str, index: DatasetIndex) -> Iterator[str]:
    """Yield a warning if no token of the conversations in the folder ``out`` ends a turn; none for text, and for
    datasets in stores.

    Raises ``TokenizerError``.
    """
    from phalanx.data.chat.encode import saved_template, turn_ends
    from phalanx.data.tokenizers.tokenizer import load_tokenizer

    folder = Path(out)
    if index.recipe.chat is None or not folder.is_dir():
        return
    template = saved_template(folder)
    if template is not None and not turn_ends(template, load_tokenizer(folder)):
        yield (
            "warning: no special token of the tokenizer ends an answer in this template, so a model that learns from it may never end its turn; add the "
            "template's tokens to the tokenizer as special ones, or train one for it: --tokenizer bpe --chat-template FILE"
        )


# Progress: bytes of the files or tasks, and time left, on one line of a terminal or on lines of a log.

_TERMINAL_PAUSE_S = 0.2
_LOG_PAUSE_S = 5.0
_RATE_AFTER_S = 1.0
_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


class PrepareProgress:
    """Progress display, called with (stage, done, in all); as a context manager it ends its line."""

    def __init__(self, files: Files | None = None, *, quiet: bool = False) -> None:
        """Set up the display on standard error. With ``files``, their bytes are shown instead of the stage's items."""
        self._files, self._quiet = files, quiet
        self._terminal = sys.stderr.isatty()
        self._stage = ""
        self._stage_start_s = self._last_s = time.monotonic()
        self._done_at_start = 0
        self._width = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._end_line()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show the progress of a stage, every 0.2 s on a terminal, else every 5 s, and always its begin and end;
        nothing if quiet.

        A new stage begins a new line on a terminal.
        """
        now_s = time.monotonic()
        if stage != self._stage:
            self._end_line()
            self._stage, self._stage_start_s, self._last_s = stage, now_s, now_s
            self._done_at_start = done
        pause_s = _TERMINAL_PAUSE_S if self._terminal else _LOG_PAUSE_S
        if not self._quiet and (done in (0, total) or now_s - self._last_s >= pause_s):
            self._last_s = now_s
            self._show(self._line(done, total, now_s - self._stage_start_s))

    def _end_line(self) -> None:
        """End the line that is being written on a terminal."""
        if self._width:
            click.echo(err=True)
        self._width = 0

    def _line(self, done: int, total: int, elapsed_s: float) -> str:
        """Return the line of progress. With files: their bytes, and after the first second their rate and the time left.

        Otherwise the items done; of ``total`` unless that is 0, with the time left at the pace of this stage if it is at least 1 s.
        """
        if self._files is not None:
            return f"{self._stage}: {in_words(self._files.report.bytes_done, self._files.bytes_in_all, elapsed_s)}"
        if not total:
            return f"{self._stage}: {done:,}"
        newly = done - self._done_at_start
        left_s = elapsed_s / newly * (total - done) if newly else 0.0
        return f"{self._stage}: {done:,} of {total:,}" + (
            f", {_duration(left_s)} left" if left_s >= 1 else ""
        )

    def _show(self, line: str) -> None:
        """Print a line to standard error; on a terminal, over the line before."""
        if not self._terminal:
            click.echo(line, err=True)
            return
        click.echo("\r" + line.ljust(self._width), err=True, nl=False)
        self._width = len(line)


def in_words(done: int, in_all: int, elapsed_s: float) -> str:
    """Return the progress of bytes in words, such as "1.2 of 4.0 GB, 35 MB/s, 80 s left"; no rate in the first
    second.
    """
    unit, size = next(((name, size) for name, size in _UNITS if in_all >= size), ("bytes", 1))
    digits = 0 if size == 1 else 1
    text = f"{done / size:.{digits}f} of {in_all / size:.{digits}f} {unit}"
    if elapsed_s < _RATE_AFTER_S or not done:
        return text
    rate = done / elapsed_s
    remaining = f", {_duration((in_all - done) / rate)} left" if done < in_all else ""
    return f"{text}, {rate / 1e6:.{0 if rate >= 1e7 else 1}f} MB/s{remaining}"


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
