"""The plan of a preparation: raw files divided into portions. It depends only on the listing and the recipe.

A portion is the input of one task: pieces of files in the order of their URLs, with a total of ``portion_bytes`` or slightly more. The plan is
stored first, with a create operation that fails if another plan exists. So it identifies everything prepared there. The plan is one small
object; the pieces, of which there can be millions, are a separate object named by its digest.
"""

from __future__ import annotations

import json
import unicodedata
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib.metadata import version as package_version
from pathlib import Path

from phalanx.data.chat.encode import ChatEncoder, ChatLayout
from phalanx.data.chat.template import template_beside
from phalanx.data.dedup import require_rensa
from phalanx.data.errors import CorpusError, PreparationError
from phalanx.data.formats.compressed import Compression
from phalanx.data.formats.document import ReadOptions, Span
from phalanx.data.formats.read import FileFormat, Kind, recognize, require_text, spans
from phalanx.data.portions.planning.raw_files import LocalBytes, RawFile, list_raw_files, scratch_folder
from phalanx.data.portions.planning.recipe import (
    PreparationRecipe,
    RawSource,
    differences,
    read_options,
    recipe_of,
    recipe_table,
    sha256_hex,
)
from phalanx.data.preparing.prepare import PREPARATION_FOLDER
from phalanx.data.preparing.split_writer import Encoding, HeldOutEnd, SplitRule, description, named_tokenizer
from phalanx.data.steps.choose import resolved
from phalanx.data.tokenizers.tokenizer import Tokenizer
from phalanx.run.fields import JsonObject, Problem
from phalanx.store.store import ExistsError, MissingObjectError, Store
from phalanx.version import __version__

PREPARATION = PREPARATION_FOLDER
"""Key prefix of all objects of a dataset's preparation, beside the dataset."""
PLAN_KEY = f"{PREPARATION}/plan.json"
INDEX_KEY = "index.json"
_PLAN_VERSION = 1
_LEAST_PORTION_BYTES = 64 << 20
_MOST_PORTIONS = 1 << 15
_HEAD_BYTES = 4 << 20
_TAIL_BYTES = 1 << 16


@dataclass(frozen=True)
class FileSpan:
    """A span of one raw file."""

    file: int
    """Number of the file in the plan."""
    span: Span


@dataclass(frozen=True)
class PreparationPlan:
    """The inputs and portions of a preparation."""

    recipe: PreparationRecipe
    tokenizer: str
    """"bytes", "bpe" for one that is trained, or "file:" and the fingerprint of an existing one."""
    portion_bytes: int
    files: tuple[RawFile, ...]
    formats: tuple[FileFormat, ...]
    """The format of each file."""
    portions: tuple[tuple[FileSpan, ...], ...]
    software: dict[str, str]
    """Versions of the software that affects the output."""
    held_out_end: HeldOutEnd | None = None
    """``None``: only a document's hash decides its split."""

    @property
    def split_rule(self) -> SplitRule:
        """The rule that assigns documents to splits."""
        return SplitRule(self.recipe.output.held_out, self.recipe.output.hold_out_by, self.held_out_end)

    @cached_property
    def pieces_object(self) -> bytes:
        """Return the files, with their formats, and the pieces of portions, as zlib-compressed JSON."""
        rows = {
            "files": [
                [f.url, f.name, f.nbytes, f.mark, f.source, form.kind.value, form.compression.value]
                for f, form in zip(self.files, self.formats, strict=True)
            ],
            "portions": [
                [[p.file, p.span.start, p.span.stop, p.span.first, p.span.file_bytes] for p in pieces]
                for pieces in self.portions
            ],
        }
        return zlib.compress(json.dumps(rows, separators=(",", ":")).encode(), 6)

    @cached_property
    def head(self) -> JsonObject:
        """Return the content of ``plan.json``: recipe, sizes, software and the hash of the uncompressed pieces. The
        held-out end is there only if it is chosen.
        """
        return {
            "version": _PLAN_VERSION,
            "recipe": recipe_table(self.recipe),
            "tokenizer": self.tokenizer,
            "portion_bytes": self.portion_bytes,
            "software": self.software,
            "files": len(self.files),
            "bytes": sum(file.nbytes for file in self.files),
            "portions": len(self.portions),
            "pieces_sha256": sha256_hex(zlib.decompress(self.pieces_object)),
            **({"held_out_end": asdict(self.held_out_end)} if self.held_out_end is not None else {}),
        }

    @cached_property
    def text(self) -> bytes:
        """The bytes of ``plan.json``."""
        return (json.dumps(self.head, indent=1) + "\n").encode()

    @cached_property
    def sha256(self) -> str:
        """The plan's identity."""
        return sha256_hex(self.text)

    def bytes_of(self, portion: int) -> int:
        """Return the stored bytes of raw files that a portion reads."""
        return sum(piece.span.file_bytes for piece in self.portions[portion])


def make_plan(
    recipe: PreparationRecipe, folder: Path, files: Sequence[RawFile] | None = None, *, out: str = ""
) -> tuple[PreparationPlan, Tokenizer | None]:
    """Return the plan of a recipe whose file is in ``folder``, and its tokenizer if it exists already.

    Lists the sources except what is below ``out``, unless ``files`` are given in order, and reads the beginning of
    each file. Raises ``CorpusError``, ``TokenizerError``, ``StoreError``, and ``PreparationError`` for a step or a
    missing package.
    """
    recipe = replace(recipe, step=tuple(resolved(step, folder) for step in recipe.step))
    tokenizer = named_tokenizer(recipe.output.tokenizer, folder)
    if recipe.output.layout == "chat" and tokenizer is not None:
        recipe = _with_template(recipe, folder, tokenizer)
    if files is None:
        files = list_raw_files(recipe.source, folder, out)
    portion_bytes = recipe.output.portion_bytes or default_portion_bytes(sum(file.nbytes for file in files))
    formats: list[FileFormat] = []
    pieces: list[FileSpan] = []
    with scratch_folder("phalanx-plan-") as scratch:
        for number, file in enumerate(files):
            options = read_options(recipe, file.source)
            source = recipe.source[file.source]
            form, file_spans = _inspected(file, portion_bytes, options, scratch, source)
            formats.append(form)
            pieces += [FileSpan(number, span) for span in file_spans]
    if not pieces:
        raise CorpusError("the sources of the recipe hold no text: every file is empty")
    portions = tuple(_portions(pieces, portion_bytes))
    software = software_of(recipe)
    plan = PreparationPlan(
        recipe, description(tokenizer), portion_bytes, tuple(files), tuple(formats), portions, software
    )
    return plan, tokenizer


def _with_template(recipe: PreparationRecipe, folder: Path, tokenizer: Tokenizer) -> PreparationRecipe:
    """Return the recipe with the text of its chat template and its special tokens, after checking it against the
    tokenizer.

    Raises ``TokenizerError`` if there is none that can be used.
    """
    output = recipe.output
    template_file = folder / output.chat_template if output.chat_template else None
    template = template_beside(folder / output.tokenizer, template_file)
    ChatEncoder(tokenizer, ChatLayout(template), output.seq_len)
    return replace(
        recipe,
        output=replace(output, template=template.source, special_tokens=dict(template.special_tokens)),
    )


def software_of(recipe: PreparationRecipe) -> dict[str, str]:
    """Return this machine's versions of software that affects the output: Phalanx, tokenizers, Unicode, and rensa and
    Jinja if the recipe needs them.

    Raises ``PreparationError`` if rensa is needed and missing.
    """
    near = recipe.dedup is not None and recipe.dedup.near is not None
    if near:
        require_rensa()
    return {
        **({"rensa": package_version("rensa")} if near else {}),
        **({"jinja2": package_version("jinja2")} if recipe.output.layout == "chat" else {}),
        "phalanx": __version__,
        "tokenizers": package_version("tokenizers"),
        "unicode": unicodedata.unidata_version,
    }


def default_portion_bytes(total_bytes: int) -> int:
    """Return 64 MiB, or the size that gives 32,768 portions, rounded up to a power of two."""
    return 1 << (max(_LEAST_PORTION_BYTES, -(-total_bytes // _MOST_PORTIONS)) - 1).bit_length()


def _inspected(
    file: RawFile, portion_bytes: int, options: ReadOptions, scratch: Path, source: RawSource
) -> tuple[FileFormat, list[Span]]:
    """Return a file's format and its spans, from its beginning and end; a remote Arrow or text file is one span.

    Raises ``CorpusError`` if it is unreadable or has no text field; a remote Arrow file's fields are not looked at. The
    local copy is removed.
    """
    local = LocalBytes(file, scratch)
    try:
        local.bring(0, _HEAD_BYTES)
        if file.nbytes > _HEAD_BYTES:
            local.bring(max(_HEAD_BYTES, file.nbytes - _TAIL_BYTES), file.nbytes)
        form = recognize(local.path, may_be_damaged=source.on_bad == "skip")
        if source.as_text and form.kind is Kind.JSONL:
            form = replace(form, kind=Kind.TEXT)
        if form.kind is Kind.PARQUET and local.is_copy:
            bring_parquet_footer(local, file.nbytes)
        if local.is_copy and form.kind is Kind.ARROW:
            return form, [Span(0, 1 << 40, 0, file.nbytes)]
        require_text(local.path, form, options)
        if local.is_copy and form.kind is Kind.TEXT:
            # Cuts of a text depend on its line ends, which would require fetching the complete file.
            return form, [Span(0, file.nbytes, 0, file.nbytes)]
        return form, spans(local.path, form, portion_bytes, options)
    except CorpusError as error:
        raise CorpusError(local.named(str(error)).replace("--text-field", "source.text_field")) from error
    finally:
        if local.is_copy:
            local.path.unlink(missing_ok=True)


def bring_parquet_footer(local: LocalBytes, nbytes: int) -> None:
    """Fetch the footer of a remote Parquet file of ``nbytes`` bytes. Its length is in the 8 bytes before the end,
    which are in the copy already.
    """
    with local.path.open("rb") as copy:
        copy.seek(nbytes - 8)
        length = int.from_bytes(copy.read(4), "little")
    local.bring(max(0, nbytes - 8 - length), nbytes)


def _portions(pieces: Sequence[FileSpan], portion_bytes: int) -> Iterator[tuple[FileSpan, ...]]:
    """Yield the pieces in order, grouped so that no portion exceeds ``portion_bytes``; a larger piece is alone."""
    current: list[FileSpan] = []
    size = 0
    for piece in pieces:
        if current and size + piece.span.file_bytes > portion_bytes:
            yield tuple(current)
            current, size = [], 0
        current.append(piece)
        size += piece.span.file_bytes
    if current:
        yield tuple(current)


def commit_plan(store: Store, plan: PreparationPlan, tokenizer: Tokenizer | None) -> None:
    """Store the plan and its tokenizer, unless the same plan is stored already.

    The plan's own object is created last. Raises ``PreparationError`` if the store has another plan or something else.
    """
    stored = get_if_stored(store, PLAN_KEY)
    if stored is None:
        other_key = next(
            (info.key for info in store.list() if not info.key.startswith(f"{PREPARATION}/")), None
        )
        # The other files may be from the same preparation, started in the meantime.
        if other_key is not None and (stored := get_if_stored(store, PLAN_KEY)) is None:
            description = (
                "a dataset that was not prepared in portions" if is_stored(store, INDEX_KEY) else other_key
            )
            raise PreparationError(
                f"{store.url} holds something else ({description}); choose another --out, or remove it"
            )
    if stored is None:
        store.put(_pieces_key(str(plan.head["pieces_sha256"])), plan.pieces_object)
        if tokenizer is not None:
            put_tokenizer(store, tokenizer)
        try:
            store.create(PLAN_KEY, plan.text)
            return
        except ExistsError:
            stored = store.get(PLAN_KEY)
    if stored != plan.text:
        raise PreparationError(_how_it_differs(store, plan))


def _how_it_differs(store: Store, plan: PreparationPlan) -> str:
    """Return the message that names the first change since the stored plan, and the remedy: files if only they
    differ, software if only that does, else recipe. Raises ``PreparationError`` if the stored plan is damaged.
    """
    stored_head = read_plan(store).head  # raises an error for a damaged plan
    names = differences(stored_head, plan.head)
    remedy = "choose another --out, or remove that one"
    listing = {"pieces_sha256", "files", "bytes", "portions", "portion_bytes"}
    # Fields that depend on the listing and the files' content.
    listing |= {name for name in names if name.startswith("held_out_end")}
    if names and set(names) <= listing:
        before = {file.url: file for file in read_plan(store).files}
        now = {file.url: file for file in plan.files}
        changed = [url for url in sorted({*before, *now}) if before.get(url) != now.get(url)]
        first = changed[0] if changed else "a source"
        change = "is new" if first not in before else "is gone" if first not in now else "changed"
        more = f", and {len(changed) - 1:,} more files" if len(changed) > 1 else ""
        return f"{first} {change} since the plan at {store.url} was made{more}; plan again: {remedy}"
    if all(name.startswith("software") for name in names):
        return (
            f"{store.url} was planned with other software ({', '.join(names)}: {stored_head['software']}, here {plan.software}); "
            f"use that, or {remedy}"
        )
    shown = [name.removeprefix("recipe.").removeprefix("output.") for name in names if name not in listing]
    return f"{store.url} has another recipe ({', '.join(dict.fromkeys(shown))} differs); {remedy}"


def put_tokenizer(
    store: Store, saved: Tokenizer | Encoding, below: str = f"{PREPARATION}/tokenizer/"
) -> list[str]:
    """Store the files of a tokenizer, or of an encoding with its chat template, with keys that begin with ``below``; return their keys."""
    with scratch_folder("phalanx-tokenizer-") as scratch:
        saved.save(scratch)
        files = sorted(scratch.iterdir())
        for file in files:
            store.put(f"{below}{file.name}", file.read_bytes())
        return [f"{below}{file.name}" for file in files]


def read_plan(store: Store) -> PreparationPlan:
    """Return the plan in the store. Raises ``PreparationError`` if there is none, or if it is damaged, of another
    version, or not exactly as written.
    """
    text = get_if_stored(store, PLAN_KEY)
    if text is None:
        raise PreparationError(
            f"there is no plan at {store.url}; make it: phalanx data plan RECIPE.toml --out {store.url}"
        )
    try:
        head = json.loads(text)
        if head["version"] != _PLAN_VERSION:
            raise PreparationError(
                f"{store.url}/{PLAN_KEY} has version {head['version']!r}, this Phalanx reads {_PLAN_VERSION}; use the release that made it"
            )
        problems: list[Problem] = []
        recipe = recipe_of(head["recipe"], problems)
        packed = store.get(_pieces_key(head["pieces_sha256"]))
        unpacked = zlib.decompress(packed)
        if recipe is None or problems or sha256_hex(unpacked) != head["pieces_sha256"]:
            raise ValueError("; ".join(map(str, problems)) or "other pieces")
        rows = json.loads(unpacked)
        plan = PreparationPlan(
            recipe,
            head["tokenizer"],
            head["portion_bytes"],
            tuple(RawFile(*row[:5]) for row in rows["files"]),
            tuple(FileFormat(Kind(row[5]), Compression(row[6])) for row in rows["files"]),
            tuple(tuple(FileSpan(row[0], Span(*row[1:])) for row in portion) for portion in rows["portions"]),
            head["software"],
            HeldOutEnd(**head["held_out_end"]) if "held_out_end" in head else None,
        )
        # Check that the parsed plan gives the stored text, independent of zlib's output.
        if plan.text != text:
            raise ValueError("it is not what was written")
    except (RecursionError, ValueError, KeyError, TypeError, zlib.error, MissingObjectError) as error:
        raise PreparationError(
            f"{store.url}/{PLAN_KEY} is damaged ({error}); prepare again with another --out"
        ) from error
    return plan


def is_stored(store: Store, key: str) -> bool:
    """Return True if the store has the object."""
    try:
        store.info(key)
    except MissingObjectError:
        return False
    return True


def get_if_stored(store: Store, key: str) -> bytes | None:
    """Return the object; ``None`` if the store has none."""
    try:
        return store.get(key)
    except MissingObjectError:
        return None


def _pieces_key(sha256: str) -> str:
    return f"{PREPARATION}/pieces-{sha256[:16]}.json.z"
