"""The files of the page: what a strict content policy and hostile text demand of them."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

STATIC = files("phalanx_watch.page") / "static"
MODULES = sorted(file.name for file in STATIC.iterdir() if file.name.endswith(".js"))


@pytest.mark.parametrize("name", MODULES)
def test_a_module_makes_no_html_and_no_code_of_text(name: str) -> None:
    text = (STATIC / name).read_text()
    forbidden = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|cssText|\bimport\("
    )
    code = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)  # types in comments have import("./x.js")
    assert re.findall(forbidden, code) == []


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_only_files_that_come_with_it(name: str) -> None:
    text = (STATIC / name).read_text()
    for path in re.findall(r"""^(?:import|export) .* from "([^"]+)";$""", text, re.MULTILINE):
        assert path.startswith("./")
        assert STATIC.joinpath(*path[2:].split("/")).is_file()


def test_the_document_has_no_script_style_or_address_of_its_own() -> None:
    document = (STATIC / "index.html").read_text()
    assert re.findall(r"<script(?![^>]* src=)|<style|\son\w+=|\sstyle=|https?:", document) == []
    for path in re.findall(r'(?:src|href)="/static/([^"]+)"', document):
        assert STATIC.joinpath(*path.split("/")).is_file()


def test_what_others_wrote_comes_with_its_license() -> None:
    assert "MIT" in (STATIC / "vendor" / "uPlot.LICENSE").read_text()
