"""Links that lead out of docs/ in the site of the manual (``docs/hooks/outside_links.py``)."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
replace_outside_links = runpy.run_path(str(ROOT / "docs" / "hooks" / "outside_links.py"))[
    "replace_outside_links"
]


@pytest.mark.parametrize(
    "link",
    ["[words](glossary.md#words)", "[logs](../watch/logs.md)", "[a](https://a.org)", "![a](../images/a.svg)"],
)
def test_a_link_inside_the_manual_or_to_another_site_stays(link: str) -> None:
    assert replace_outside_links(link, "design/architecture.md", None) == link


def test_a_link_out_of_the_manual_leads_to_the_repository_if_the_project_names_one() -> None:
    replaced = replace_outside_links(
        "[how](../../CONTRIBUTING.md#tests)", "design/architecture.md", "https://git.org/p"
    )
    assert replaced == "[how](https://git.org/p/blob/main/CONTRIBUTING.md#tests)"


def test_a_link_out_of_the_manual_is_plain_text_without_a_repository() -> None:
    assert replace_outside_links("see [how](../CONTRIBUTING.md).", "README.md", None) == "see how."
