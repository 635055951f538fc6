"""Tasks of a preparation and their manifests, which make it safe to run a task again, on any machine, and twice at once.

A task writes objects and then its manifest, which lists them with checksums and is created only if absent. A task with a manifest is not run
again. A task's output depends only on the plan and on manifests of earlier stages, so two workers on one task write equal bytes under equal
keys. If a worker's output differs, for example because of another library version, it finds the other's manifest and fails.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial

import msgspec
import xxhash

from phalanx.data.chat.encode import ChatEncoder, ChatLayout
from phalanx.data.chat.template import ChatTemplate
from phalanx.data.errors import PreparationError
from phalanx.data.portions.planning.plan import (
    INDEX_KEY,
    PREPARATION,
    PreparationPlan,
    get_if_stored,
    is_stored,
    read_plan,
)
from phalanx.data.portions.planning.raw_files import scratch_folder
from phalanx.data.preparing.split_writer import Encoding
from phalanx.data.tokenizers.published import CONFIG_FILE, TOKENIZER_FILE
from phalanx.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from phalanx.run.fields import JsonObject
from phalanx.store.open_store import open_store
from phalanx.store.store import ExistsError, Store

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
    """The objects and counts of a completed task."""

    stage: str
    task: int
    plan: str
    """Identity of the plan."""
    objects: list[StoredObject] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    facts: JsonObject = field(default_factory=dict)
    """Results that later stages need."""


@dataclass(frozen=True)
class Stage:
    """A set of tasks that must all be done before the next stage begins."""

    name: str
    tasks: int


class Workplace:
    """A preparation as every worker opens it: its store, its plan and its completed tasks."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.store: Store = open_store(url)

    @cached_property
    def plan(self) -> PreparationPlan:
        return read_plan(self.store)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Return the dataset's tokenizer. Read from the store once; it must exist or be trained first."""
        with scratch_folder("phalanx-tokenizer-") as folder:
            for name in (TOKENIZER_FILE, CONFIG_FILE):
                (folder / name).write_bytes(self.store.get(f"{PREPARATION}/tokenizer/{name}"))
            return load_tokenizer(folder)

    @cached_property
    def encoding(self) -> Encoding:
        """Return the encoding of documents into the dataset's tokens, with the chat template only for the layout
        "chat". Reads the tokenizer.
        """
        output, chat = self.plan.recipe.output, None
        if output.layout == "chat":
            layout = ChatLayout(ChatTemplate(output.template, output.special_tokens), output.too_long)
            chat = ChatEncoder(self.tokenizer, layout, output.seq_len)
        return Encoding(self.tokenizer, output.seq_len, output.length_classes, chat)

    def put(self, manifest: TaskManifest, key: str, data: bytes | memoryview) -> StoredObject:
        """Store an object of a task, and add it with its size and checksum to the task's manifest, which is not stored yet."""
        self.store.put(key, data)
        written = StoredObject(key, memoryview(data).nbytes, xxhash.xxh3_128(data).hexdigest())
        manifest.objects.append(written)
        return written

    def put_packed(self, manifest: TaskManifest, name: str, data: bytes) -> None:
        """Store compressed data for later stages below the task's key."""
        self.put(manifest, f"{PREPARATION}/{manifest.stage}/{name}", zlib.compress(data, 1))

    def get_packed(self, written: StoredObject) -> bytes:
        """Return the data passed to ``put_packed``. Raises ``PreparationError`` if it is damaged, and ``StoreError`` if it is missing."""
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
        """Create the manifest, which completes the task.

        Raises ``PreparationError`` if a manifest with other content exists. The same content again is accepted, if the
        store's ``create`` accepts it.
        """
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
        """Return a task's manifest; ``None`` if it is not done. Raises ``PreparationError`` if it is damaged or of another plan."""
        key = manifest_key(stage, task)
        content = get_if_stored(self.store, key)
        if content is None:
            return None
        try:
            manifest = msgspec.json.decode(content, type=TaskManifest)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise PreparationError(
                f"{self.url}/{key} is damaged ({error}); remove it, and give the same command: that task is done again"
            ) from None
        if manifest.plan != self.plan.sha256:
            raise PreparationError(f"{self.url}/{key} is of another plan; prepare again with another --out")
        return manifest

    def required_manifest(self, stage: str, task: int) -> TaskManifest:
        """Return a task's manifest. Raises ``PreparationError`` also if it is not done."""
        manifest = self.manifest(stage, task)
        if manifest is None:
            raise PreparationError(f"task {task} of stage {stage} is not done; give the same command again")
        return manifest

    def is_done(self, stage: str, task: int) -> bool:
        """Return True if the task's manifest exists."""
        return is_stored(self.store, manifest_key(stage, task))

    def manifests(self, stage: Stage) -> list[TaskManifest]:
        """Return the manifests of all tasks of a stage, in order. Raises ``PreparationError`` if one is missing."""
        with ThreadPoolExecutor(_READ_AT_ONCE) as pool:
            return list(pool.map(partial(self.required_manifest, stage.name), range(stage.tasks)))

    def done(self, stage: Stage) -> set[int]:
        """Return the numbers of a stage's completed tasks, by the manifests in the store, which are not read."""
        if stage.name == SEAL:
            return {0} if self.is_done(SEAL, 0) else set()
        below = _manifests_of(stage.name)
        names = (info.key.removeprefix(f"{below}/") for info in self.store.list(below))
        return {int(name.removesuffix(".json")) for name in names if name.endswith(".json")}


def manifest_key(stage: str, task: int) -> str:
    """Return the key of a task's manifest. The manifest of the seal is the dataset's index."""
    if stage == SEAL:
        return INDEX_KEY
    return f"{_manifests_of(stage)}/{task:05d}.json"


def _manifests_of(stage: str) -> str:
    return f"{PREPARATION}/done/{stage}"


def total(manifests: Sequence[TaskManifest]) -> dict[str, int]:
    """Return the sums of several tasks' counts, by name."""
    sums: Counter[str] = Counter()
    for manifest in manifests:
        sums.update(manifest.counts)
    return dict(sums)
