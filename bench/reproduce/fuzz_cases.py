"""The cases of ``bench.reproduce.fuzz``: good files of every kind that Phalanx reads, and random damage to them.

A subject makes one case from a random generator: it copies good files into an empty folder and damages them. The case has the command that
reads them, and ``must_notice`` if the command must detect the damage. The damage does not depend on how Phalanx reads.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import tomli_w

from phalanx.cli.main import phalanx_command

ROOT = Path(__file__).parents[2]
TEXT = "The weights belong to the run and not to the fleet: {number} of them, at the end, have one hash.\n"
RUN = """
name = "good"
[model]
layers = 2
dim = 32
heads = 4
kv_heads = 2
ffn_dim = 48
[data]
path = "{data}"
[train]
steps = 4
batch_size = 4
seq_len = 32
slots = 2
[checkpoint]
every_steps = 2
[evaluation]
every_steps = 2
sequences = 4
final_sequences = 4
[observe]
memory_at_step = 0
[runtime]
device = "cpu"
"""
ODD_NUMBERS = (0, -1, 1, 2, 3, 7, 63, 10**6, 10**9, 10**18, 2**63, 10**40, 0.5, -0.0, 1e-300, 1e300, 1e18)
ODD_VALUES: tuple[Any, ...] = (
    *ODD_NUMBERS, *(float("nan"), float("inf"), True, False, "", "x", "ü" * 50, "../../x", "a/b\\c", "\u202e", "1e3", "none"),
    *([], [1, 2], ["a"], [[]], {}, {"a": 1}, {"layers": {"layers": {}}}, "x" * 5000),
)  # fmt: skip
ODD_WORDS = (
    *("", "0", "-1", "1", "3", "1000000000000", "1e400", "nan", "x", "x=y", "train.steps=", "=", "optimizer.lr=-1", "--", "-h"),
    *("model.layers=1000000000", "/dev/null", "/", ".", "..", "x" * 300, "\x01", "ü", "h100:8", "cpu:4", "h100:0", "llama3-8b"),
    *("configs/quickstart.toml", "configs/llama3-405b.toml", "step-00000002", "1T", "-5T", "90%", "[1,2]", "{}", '"'),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One command, run in a folder of its own."""

    command: tuple[str, ...]
    damage: str
    must_notice: bool = False
    """True if a command that ends well has overlooked the damage."""


@dataclass(frozen=True)
class Good:
    """The folders that are damaged: a finished run, its prepared data, and its model as a Hugging Face folder."""

    run: Path
    data: Path
    published: Path


def make_good(folder: Path) -> Good:
    """Make one of each with Phalanx's own commands."""
    texts = folder / "texts"
    texts.mkdir()
    for number in range(40):
        (texts / f"{number}.txt").write_text(TEXT.format(number=number) * 20)
    good = Good(folder / "run", folder / "data", folder / "published")
    run_file = folder / "good.toml"
    run_file.write_text(RUN.format(data=good.data))
    for command in (
        ("data", "prepare", str(texts), "--out", str(good.data), "--vocab-size", "300"),
        ("train", str(run_file), "--set", f"run_dir={good.run}"),
        ("export", str(good.run), "--to", "hf", str(good.published)),
    ):
        subprocess.run([sys.executable, "-m", "phalanx", *command], check=True, stdout=subprocess.DEVNULL)
    return good


Subject = Callable[[random.Random, Good, Path], Case]


def run_file_values(draw: random.Random, _good: Good, work: Path) -> Case:
    """One to three fields of a run file have another value, another type, or an unknown name."""
    table = tomllib.loads((draw.choice(sorted((ROOT / "configs").glob("*.toml")))).read_text())
    words = []
    for _ in range(draw.randint(1, 3)):
        section = draw.choice([name for name, value in table.items() if isinstance(value, dict)])
        inside = table[section]
        field = draw.choice([*inside, "nosuch", "layers", "steps", "tensor"])
        value = draw.choice(ODD_VALUES)
        if draw.random() < 0.1:
            section, table[section] = section, value
        else:
            inside[field] = value
        words.append(f"{section}.{field} = {str(value)[:40]}")
        if not any(isinstance(value, dict) for value in table.values()):
            break
    file = work / "run.toml"
    try:
        file.write_text(tomli_w.dumps(table))
    except (OverflowError, UnicodeEncodeError):
        file.write_text("steps = 1" + "0" * 5000)
    return Case((draw.choice(("show", "show", "plan")), str(file)), "; ".join(words))


def run_file_bytes(draw: random.Random, _good: Good, work: Path) -> Case:
    """The bytes of a run file are flipped, cut, doubled or replaced."""
    body = draw.choice(sorted((ROOT / "configs").glob("*.toml"))).read_bytes()
    body, damage = _damaged(draw, body)
    (work / "run.toml").write_bytes(body)
    return Case(("show", str(work / "run.toml")), damage)


def checkpoint_files(draw: random.Random, good: Good, work: Path) -> Case:
    """One file of a checkpoint is damaged, and each reader of its weights must notice."""
    shutil.copytree(good.run, work / "run")
    step = work / "run" / "checkpoints" / "step-00000004"
    damage = _damage_a_file(draw, sorted(path for path in step.rglob("*") if path.is_file()))
    reader = draw.choice((("checkpoint", "verify"), ("hash",), ("export",)))
    output = ("--to", "hf", str(work / "out")) if reader == ("export",) else ()
    harmless = "bytes more" in damage and reader != (
        "checkpoint",
        "verify",
    )  # bytes behind the tensors are not read
    return Case((*reader, str(step), *output), damage, must_notice=not harmless)


def prepared_data(draw: random.Random, good: Good, work: Path) -> Case:
    """One file of a prepared dataset is damaged."""
    shutil.copytree(good.data, work / "data")
    files = sorted(path for path in (work / "data").rglob("*") if path.is_file())
    damage = _damage_a_file(draw, files)
    file = damage.split(":")[0]
    # Missing block sums are reported, but are no damage: older datasets have none.
    shard = file.endswith(".bin") or (file.endswith(".sums") and "gone" not in damage)
    return Case(("data", "verify", str(work / "data")), damage, must_notice=shard)


def published_model(draw: random.Random, good: Good, work: Path) -> Case:
    """A file of a Hugging Face folder is damaged, or a field of its configuration has an odd value."""
    shutil.copytree(good.published, work / "published")
    if draw.random() < 0.5:
        file = work / "published" / "config.json"
        table = json.loads(file.read_text())
        field, value = draw.choice([*table, "rope_scaling", "nosuch"]), draw.choice(ODD_VALUES)
        file.write_text(json.dumps({**table, field: value}))
        damage = f"config.json: {field} = {str(value)[:40]}"
    else:
        files = sorted(path for path in (work / "published").rglob("*") if path.is_file())
        damage = _damage_a_file(draw, files)
    return Case(("import", str(work / "published"), "--out", str(work / "out")), damage)


def events(draw: random.Random, good: Good, work: Path) -> Case:
    """The log of a run's events has odd times and values, torn and repeated lines."""
    shutil.copytree(good.run, work / "run", ignore=shutil.ignore_patterns("checkpoints"))
    file = work / "run" / "events.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    damage = []
    for _ in range(draw.randint(1, 4)):
        number = draw.randrange(len(lines))
        kind = draw.choice(("value", "value", "bytes", "twice", "gone", "moved"))
        if kind == "value":
            try:
                event = json.loads(lines[number])
                field = draw.choice([*event, "t", "nosuch"]) if isinstance(event, dict) else "t"
                event[field] = draw.choice(ODD_VALUES)
                lines[number] = json.dumps(event).encode() + b"\n"
                kind = f"{field} = {str(event[field])[:30]}"
            except (ValueError, TypeError):
                lines[number] = b"{"
        elif kind == "bytes":
            lines[number], kind = _damaged(draw, lines[number])
        elif kind == "twice":
            lines.insert(draw.randrange(len(lines)), lines[number])
        elif kind == "gone" and len(lines) > 1:
            del lines[number]
        else:
            draw.shuffle(lines)
        damage.append(f"line {number}: {kind}")
    file.write_bytes(b"".join(lines))
    reader = draw.choice((("goodput",), ("goodput", "--json"), ("watch", "--once"), ("status",), ("runs",)))
    place = work if reader == ("runs",) else work / "run"
    return Case((reader[0], str(place), *reader[1:]), "; ".join(damage))


def command_lines(draw: random.Random, good: Good, work: Path) -> Case:
    """Any command that does not train gets random arguments and options."""
    group, path = phalanx_command, []
    context = click.Context(phalanx_command)
    while isinstance(group, click.Group):
        names = [name for name in group.list_commands(context) if name not in LONG_COMMANDS]
        path.append(draw.choice(names))
        command = group.get_command(context, path[-1])
        assert command is not None
        group = command
    places = (
        str(good.run),
        str(good.data),
        str(good.published),
        str(ROOT / "configs/quickstart.toml"),
        str(work),
    )
    words = list(path)
    for parameter in group.params:
        if isinstance(parameter, click.Argument):
            words.append(draw.choice((*places, *ODD_WORDS)))
        elif isinstance(parameter, click.Option) and draw.random() < 0.3:
            words.append(draw.choice(parameter.opts))
            if not parameter.is_flag:
                words.append(draw.choice((*places, *ODD_WORDS)))
    return Case(tuple(_without_writing(words, good, work)), "random words")


LONG_COMMANDS = ("train", "agent", "health", "calibrate", "serve", "watch", "simulate")
"""Commands that start processes, measure or simulate for minutes, or follow a run until they are stopped."""


def plans(draw: random.Random, _good: Good, _work: Path) -> Case:
    """A valid call of the planner has one or two odd options."""
    command = ["plan", "layout", draw.choice(("configs/quickstart.toml", "configs/quickstart-moe.toml"))]
    command += [
        "--cluster",
        draw.choice(("h100:8", "cpu:4", "h100:16", "b200:8", "h100:0", "h100", ":8", "gb200-nvl72 x 1")),
    ]
    for _ in range(draw.randint(0, 2)):
        option = draw.choice(
            ("--tokens", "--set", "--require", "--layout", "--stack", "--top", "--spares", "--price")
        )
        command += [
            option,
            draw.choice((*ODD_WORDS, "parallel.tensor=2", "train.steps=10", "tensor=2", "data=8", "5")),
        ]
    return Case(tuple(command), " ".join(command))


SUBJECTS: dict[str, Subject] = {
    "run files, values": run_file_values,
    "run files, bytes": run_file_bytes,
    "checkpoints": checkpoint_files,
    "prepared data": prepared_data,
    "Hugging Face folders": published_model,
    "events": events,
    "command lines": command_lines,
    "plans": plans,
}


def _without_writing(words: list[str], good: Good, work: Path) -> list[str]:
    """Return the words with outputs below ``work``: a case must damage no other's files."""
    outputs = {"--out", "--report", "--output", "-o", "--write"}
    for index, word in enumerate(words[:-1]):
        if word in outputs:
            words[index + 1] = str(work / "out")
    if words[0] in ("export", "import", "data") and len(words) > 1:
        words = [
            str(work / "out") if word in (str(good.run), str(good.data)) and words[0] != "export" else word
            for word in words
        ]
    return words


def _damage_a_file(draw: random.Random, files: list[Path]) -> str:
    """Damage one of ``files``, so that its bytes differ. Return a description."""
    file = draw.choice(files)
    if draw.random() < 0.1:
        file.unlink()
        return f"{file.name}: gone"
    before = file.read_bytes()
    body, damage = _damaged(draw, before)
    while body == before:
        body, damage = _damaged(draw, before)
    file.write_bytes(body)
    return f"{file.name}: {damage}"


def _damaged(draw: random.Random, body: bytes) -> tuple[bytes, str]:
    """Return damaged bytes, which seldom equal ``body``, and a description of the damage."""
    kind, place = (
        draw.choice(("flip", "flip", "cut", "grow", "empty", "insert", "swap")),
        draw.randrange(len(body) or 1),
    )
    if kind == "flip" and body:
        bit = draw.randrange(8)
        return body[:place] + bytes([body[place] ^ 1 << bit]) + body[
            place + 1 :
        ], f"bit {bit} of byte {place}"
    if kind == "cut":
        return body[:place], f"cut at {place}"
    if kind == "grow":
        return body + draw.randbytes(9), "9 bytes more"
    if kind == "insert":
        return body[:place] + draw.randbytes(3) + body[place:], f"3 bytes inserted at {place}"
    if kind == "swap":
        return body[place:] + body[:place], f"turned by {place}"
    return b"", "empty"
