"""Tasks of a preparation and their manifests: what makes it safe to run any of them again, anywhere, twice at once.

A task writes objects and then, last, its manifest, which names them with their checksums and is created only if it is absent. A task whose manifest
is there is not run again. What a task writes follows from the plan and from manifests of earlier stages alone, so that two workers on one
task write equal bytes, under equal keys; one that did not (another library, a broken machine) finds the other's manifest and says so.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cached_property

import msgspec
import xxhash

from phalanx.data.chat.encode import ChatEncoder, ChatLayout
from phalanx.data.chat.template import ChatTemplate
from phalanx.data.errors import PreparationError
from phalanx.data.portions.planning.plan import INDEX_KEY, PREPARATION, PreparationPlan, read_plan
from phalanx.data.portions.planning.raw_files import scratch_folder
from phalanx.data.preparing.split_writer import Encoding
from phalanx.data.tokenizers.published.files import CONFIG_FILE, TOKENIZER_FILE
from phalanx.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from phalanx.run.fields import JsonObject
from phalanx.store.open_store import open_store
from phalanx.store.store import ExistsError, MissingObjectError, Store

SEAL = "seal"
_READ_AT_ONCE = 16


@dataclass(frozen=True)
class StoredObject:
    """An object that a task wrote."""

    key: str
    nbytes: int
    xxh3_128: str


@dataclass
class TaskManifest:
    """What a task has written and counted."""

    stage: str
    task: int
    plan: str
    """Identity of the plan."""
    objects: list[StoredObject] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    facts: JsonObject = field(default_factory=dict)
    """What the stage after it needs to know."""


@dataclass(frozen=True)
class Stage:
    """A map over tasks, all of which must be done before the next stage begins."""

    name: str
    tasks: int


class Workplace:
    """The place of a preparation, as every worker opens it: its store, its plan and what is there so far."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.store: Store = open_store(url)

    @cached_property
    def plan(self) -> PreparationPlan:
        return read_plan(self.store)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The dataset's tokenizer, which is given or trained before it is needed."""
        with scratch_folder("phalanx-tokenizer-") as folder:
            for name in (TOKENIZER_FILE, CONFIG_FILE):
                (folder / name).write_bytes(self.store.get(f"{PREPARATION}/tokenizer/{name}"))
            return load_tokenizer(folder)

    @cached_property
    def encoding(self) -> Encoding:
        """How documents become the dataset's tokens."""
        output, chat = self.plan.recipe.output, None
        if output.layout == "chat":
            layout = ChatLayout(ChatTemplate(output.template, output.special_tokens), output.too_long)
            chat = ChatEncoder(self.tokenizer, layout, output.seq_len)
        return Encoding(self.tokenizer, output.seq_len, output.length_classes, chat)

    def put(self, manifest: TaskManifest, key: str, data: bytes | memoryview) -> StoredObject:
        """Write an object of a task, and enter it in its manifest."""
        self.store.put(key, data)
        written = StoredObject(key, memoryview(data).nbytes, xxhash.xxh3_128(data).hexdigest())
        manifest.objects.append(written)
        return written

    def put_packed(self, manifest: TaskManifest, name: str, data: bytes) -> None:
        """Write what later stages read, compressed, below the task's key."""
        self.put(manifest, f"{PREPARATION}/{manifest.stage}/{name}", zlib.compress(data, 1))

    def get_packed(self, written: StoredObject) -> bytes:
        """What ``put_packed`` was given. Raises ``PreparationError`` if it is damaged."""
        data = self.store.get(written.key)
        if xxhash.xxh3_128(data).hexdigest() != written.xxh3_128:
            raise PreparationError(
                f"{self.url}/{written.key} is not what was written; remove {_manifests_of(written.key.split('/')[1])} there, and give the "
                "same command"
            )
        return zlib.decompress(data)

    def new_manifest(self, stage: str, task: int) -> TaskManifest:
        return TaskManifest(stage, task, self.plan.sha256)

    def commit(self, manifest: TaskManifest) -> None:
        """Create the manifest: from then on the task is done. Raises ``PreparationError`` if it was done with other bytes."""
        text = json.dumps(asdict(manifest), separators=(",", ":"), sort_keys=True).encode()
        key = manifest_key(manifest.stage, manifest.task)
        try:
            self.store.create(key, text)
        except ExistsError:
            raise PreparationError(
                f"{self.url}/{key} was written by another worker with other bytes: its software or its machine differs from this one's; "
                "find out which, and prepare again with another --out"
            ) from None

    def manifest(self, stage: str, task: int) -> TaskManifest | None:
        """The manifest of a task; ``None`` if it is not done. Raises ``PreparationError`` for one that is damaged, or of another plan."""
        key = manifest_key(stage, task)
        try:
            manifest = msgspec.json.decode(self.store.get(key), type=TaskManifest)
        except MissingObjectError:
            return None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise PreparationError(
                f"{self.url}/{key} is damaged ({error}); remove it, and give the same command: that task is done again"
            ) from None
        if manifest.plan != self.plan.sha256:
            raise PreparationError(f"{self.url}/{key} is of another plan; prepare again with another --out")
        return manifest

    def is_done(self, stage: str, task: int) -> bool:
        """True if the manifest of a task is there."""
        try:
            self.store.info(manifest_key(stage, task))
        except MissingObjectError:
            return False
        return True

    def manifests(self, stage: Stage) -> list[TaskManifest]:
        """Those of all tasks of a stage, in order. Raises ``PreparationError`` if one is missing."""
        with ThreadPoolExecutor(_READ_AT_ONCE) as pool:
            found = list(pool.map(lambda task: self.manifest(stage.name, task), range(stage.tasks)))
        there = [manifest for manifest in found if manifest is not None]
        if len(there) < len(found):
            raise PreparationError(
                f"task {found.index(None)} of stage {stage.name} is not done; give the same command again"
            )
        return there

    def done(self, stage: Stage) -> set[int]:
        """Numbers of the tasks of a stage whose manifests are there."""
        if stage.name == SEAL:
            return {0} if self.is_done(SEAL, 0) else set()
        below = _manifests_of(stage.name)
        names = (info.key.removeprefix(f"{below}/") for info in self.store.list(below))
        return {int(name.removesuffix(".json")) for name in names if name.endswith(".json")}


def manifest_key(stage: str, task: int) -> str:
    """The key of a task's manifest; that of the seal is the index of the dataset."""
    if stage == SEAL:
        return INDEX_KEY
    return f"{_manifests_of(stage)}/{task:05d}.json"


def _manifests_of(stage: str) -> str:
    return f"{PREPARATION}/done/{stage}"


def total(manifests: Sequence[TaskManifest]) -> dict[str, int]:
    """Counts of several tasks together, by name."""
    sums: dict[str, int] = {}
    for manifest in manifests:
        for name, count in manifest.counts.items():
            sums[name] = sums.get(name, 0) + count
    return sums
