"""The documents' statements about the code are true of it: words, classes, and the lists of EXTENDING.md."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import phalanx
from phalanx.cli.main import _COMMANDS
from phalanx.fleet import fault
from phalanx.hardware.catalog import cluster
from phalanx.run.spec import OptimizerSpec

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
CLASSES = Counter(
    name
    for file in SOURCE.rglob("*.py")
    for name in re.findall(r"^class (\w+)", file.read_text(), re.MULTILINE)
)


def rows(page: Path) -> list[list[str]]:
    """The cells of all rows of a page's tables, without their heads."""
    lines = [line.strip() for line in page.read_text().splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    heads = {number - 1 for number, row in enumerate(cells) if set(row[0]) <= {"-"} and row[0]}
    return [row for number, row in enumerate(cells) if number not in heads and number - 1 not in heads]


GLOSSARY = rows(ROOT / "docs" / "design" / "glossary.md")


def test_each_word_of_the_glossary_has_one_sense_and_a_term_of_the_field() -> None:
    words = [row[0] for row in GLOSSARY]
    assert len(words) == len(set(words))
    assert 40 <= len(words) <= 90
    assert all(len(row) == 4 and row[1] and row[2] for row in GLOSSARY)


def test_a_class_of_the_glossary_stands_in_one_file() -> None:
    for row in GLOSSARY:
        for name in re.findall(r"`(\w+)`", row[3]):
            assert CLASSES[name] == 1, f"{row[0]}: class {name}"


def test_the_terms_that_people_search_for_are_in_the_glossary() -> None:
    text = (ROOT / "docs" / "design" / "glossary.md").read_text().lower()
    terms = [
        "fencing",
        "heartbeat",
        "quorum",
        "rollback",
        "rendezvous",
        "prefetch",
        "lease",
        "drain",
        "straggler",
        "all-to-all",
        "checkpoint",
    ]
    terms += [
        "gradient accumulation",
        "state dict",
        "data loader",
        "write-ahead log",
        "silent data corruption",
    ]
    assert [term for term in terms if term not in text] == []


def anchors(page: Path) -> set[str]:
    """The anchors of a page: its own, and those of its headings as GitHub makes them (lower case, no punctuation, hyphens for spaces)."""
    text = page.read_text()
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    of_headings = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return of_headings | set(re.findall(r'<a id="([\w-]+)">', text))


def test_every_link_of_the_documents_leads_to_a_file_and_a_heading() -> None:
    pages = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "EXTENDING.md",
        ROOT / "CHANGELOG.md",
        *(ROOT / "docs").rglob("*.md"),
    ]
    wrong = []
    for page in pages:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            if "://" in link:
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
                wrong.append(f"{page.relative_to(ROOT)}: {link}")
    assert wrong == []


GUIDES = [
    page
    for page in sorted((ROOT / "docs").rglob("*.md"))
    if page.relative_to(ROOT / "docs").parts[0] not in ("reference", "design", "evidence")
]


def test_a_guide_has_at_most_1500_words() -> None:
    words = {str(page.relative_to(ROOT)): len(page.read_text().split()) for page in GUIDES}
    assert {page: count for page, count in words.items() if count > 1500} == {}


def test_the_index_of_the_manual_links_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / link).resolve() for link in re.findall(r"\]\(([^)#\s]+)\)", index.read_text())}
    assert set((ROOT / "docs").rglob("*.md")) - {index} - linked == set()


def test_the_changelog_begins_with_what_is_unreleased_and_names_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## \[(.+?)\]", text, re.MULTILINE)
    assert versions[0] == "Unreleased"
    assert versions[1] == phalanx.__version__


def test_the_changelog_has_each_group_of_the_convention_once_and_in_order() -> None:
    groups = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
    for version in re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]:
        headings = re.findall(r"^#+ (.+)$", version, re.MULTILINE)
        assert headings == [group for group in groups if group in headings], version.partition("\n")[0]


def test_each_change_of_the_changelog_is_one_short_line() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text().partition("## [Unreleased]")[2].splitlines()
    assert [line for line in lines if line and not line.startswith(("- ", "## ", "### "))] == []
    assert [line for line in lines if len(line) >= 120] == []


WALKS = {
    title: text
    for title, _, text in (
        section.partition("\n")
        for section in re.split(r"^### ", (ROOT / "EXTENDING.md").read_text(), flags=re.MULTILINE)[1:]
    )
}


def paths(walk: str) -> set[Path]:
    """The files and folders that a walk names, placeholders in capitals left out."""
    named = re.findall(r"`([\w./-]+(?:/|\.py|\.toml|\.md))`", WALKS[walk])
    return {_folder_of(name) / name for name in named if not re.search(r"[A-Z]{2,}/|my\.toml|/[A-Z]+_", name)}


def _folder_of(name: str) -> Path:
    first = name.partition("/")[0]
    if first in ("tests", "docs", "examples", "configs", "README.md"):
        return ROOT
    return SOURCE if first.startswith("phalanx_") else SOURCE / "phalanx"


@pytest.mark.parametrize("walk", WALKS)
def test_every_path_of_a_walk_is_there(walk: str) -> None:
    assert paths(walk)
    assert [path for path in paths(walk) if not path.exists()] == []


@pytest.mark.parametrize(
    ("walk", "example"),
    [
        ("A kind of layer", r"\bmla\b|Mla"),
        ("A parallel axis", "expert_tensor"),
        ("An optimizer", r'"soap"|\bSoap\b'),
        ("A fault", r"\bSlow\b"),
    ],
)
def test_a_walk_names_every_file_that_knows_of_its_example(walk: str, example: str) -> None:
    knowing = {file for file in SOURCE.rglob("*.py") if re.search(example, file.read_text())}
    named = paths(walk)
    assert knowing
    assert {file for file in knowing if file not in named and not named & set(file.parents)} == set()


def test_the_walk_of_a_kind_of_layer_names_no_file_that_does_not_know_of_it() -> None:
    for path in paths("A kind of layer"):
        if SOURCE in path.parents:
            files = path.rglob("*.py") if path.is_dir() else [path]
            assert any(re.search(r"\bmla\b|Mla", file.read_text()) for file in files), path


def test_every_optimizer_is_in_the_files_that_its_walk_names() -> None:
    for name in get_args(get_type_hints(OptimizerSpec)["name"]):
        rule = "train/compose.py" if name == "adamw" else "train/optimizers/matrix_rules.py"
        for file in ("model/facts/optimizer_state.py", rule):
            assert f'"{name}"' in (SOURCE / "phalanx" / file).read_text(), (name, file)
        assert name in (ROOT / "docs" / "train" / "optimizers.md").read_text().lower()


def test_every_command_is_in_the_file_that_its_walk_names() -> None:
    for name, (place, _) in _COMMANDS.items():
        package, _, function = place.partition(":")
        module = SOURCE / (package if function else f"{package}.{name}_command").replace(".", "/")
        assert f"\ndef {function or 'command'}(" in module.with_suffix(".py").read_text()


def test_every_fault_is_in_the_files_that_its_walk_names() -> None:
    grammar = re.findall(r"^    ([a-z]+) .*", (fault.__doc__ or "").partition("::")[2], re.MULTILINE)
    assert len(grammar) == len(get_args(fault.FaultAction))
    page = (ROOT / "docs" / "fleet" / "fault-injection.md").read_text()
    assert [verb for verb in grammar if f"| {verb} " not in page] == []


def test_an_accelerator_of_ones_own_is_planned_for_without_code(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        '[accelerator]\nkey = "mine"\nname = "Mine"\nlike = "h100"\nprofile = "h100"\nflops = {bf16 = 2e15}\n\n'
        '[system]\nlike = "h100"\n'
    )
    mine = cluster(f"{file}:16")
    assert (mine.accelerator.key, mine.accelerators) == ("mine", 16)
    spec = phalanx.read_run_file(ROOT / "configs" / "llama3-405b.toml")
    quick, usual = (
        phalanx.plan_run(spec, where, layout="tp=8,pp=16,dp=4")
        for where in (cluster(f"{file}:512"), "h100:512")
    )
    assert quick["best"][0]["step_s"] < usual["best"][0]["step_s"]


def test_every_test_that_the_page_of_findings_names_is_there() -> None:
    page = (ROOT / "docs" / "evidence" / "trust.md").read_text()
    named = re.findall(r"`([\w/]+\.py)(?:::(test_\w+))?`", page)
    assert len(named) > 60
    for file, test in named:
        path = ROOT / "tests" / file
        assert path.exists(), file
        assert f"def {test}(" in path.read_text() or not test, f"{file}::{test}"


def test_every_docstring_names_its_subject_first() -> None:
    fragments = [
        f"{file.relative_to(ROOT)}: {line.strip()}"
        for folder in ("src", "tests", "bench")
        for file in (ROOT / folder).rglob("*.py")
        for line in file.read_text().splitlines()
        if line.lstrip().startswith('"""Of ')
    ]
    assert fragments == []
