"""One run in one file: all of it, nothing from elsewhere, and no text of a run becomes markup."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path

import pytest

from observe.recorded import step
from phalanx.observe.events import Event, Message
from phalanx_watch.page.export import ExportError, export_run, exported, page_in_one_file
from phalanx_watch.page.runs import PageRuns
from watch.made_runs import crashed, write_events


@pytest.fixture
def static(tmp_path: Path) -> Path:
    """A small page: what an export needs of one."""
    made = tmp_path / "static"
    (made / "vendor").mkdir(parents=True)
    (made / "index.html").write_text(
        '<!doctype html><html><head><link rel="icon" href="/static/icon.svg" type="image/svg+xml" />'
        '<link rel="stylesheet" href="/static/style.css" /><script type="module" src="/static/main.js"></script></head><body></body></html>'
    )
    (made / "style.css").write_text("body { color: red; }")
    (made / "icon.svg").write_text("<svg/>")
    (made / "main.js").write_text(
        'import plot from "./vendor/plot.js";\nimport { a } from "./a.js";\nplot(a);\n'
    )
    (made / "a.js").write_text('export const a = "</script>";\n')
    (made / "vendor" / "plot.js").write_text("export default function plot() {}\n")
    return made


def _data(text: str) -> dict[str, object]:
    match = re.search(r"window\.__PHALANX_EXPORT__ = (.*?);</script>", text, re.DOTALL)
    assert match
    data: dict[str, object] = json.loads(match[1])
    return data


def test_the_file_holds_the_answers_that_a_server_would_give(tmp_path: Path, static: Path) -> None:
    size = export_run(crashed(tmp_path / "run"), tmp_path / "run.html", static)
    text = (tmp_path / "run.html").read_text()
    assert size == len(text.encode())
    data = _data(text)
    answers = data["answers"]
    assert isinstance(answers, dict)
    base = f"/api/run/{data['id']}"
    for key in (
        "",
        "/goodput",
        "/fleet",
        "/checkpoints",
        "/curves?x=step",
        "/curves?x=time",
        "/logs",
        "/why",
        "/profiles",
    ):
        assert f"{base}{key}" in answers
    assert answers[f"{base}/curves?x=step"]["series"]["loss"]["y"][-1] == 2.0
    assert answers["/api/runs"]["runs"][0]["id"] == data["id"]


def test_other_runs_of_the_server_are_not_in_the_file(tmp_path: Path, static: Path) -> None:
    crashed(tmp_path / "runs" / "a-secret-project")
    runs = PageRuns([tmp_path / "runs"])
    crashed(tmp_path / "runs" / "shown")
    (shown,) = (place for place in PageRuns([tmp_path / "runs"]).places() if place.path.name == "shown")
    assert b"a-secret-project" not in exported(runs, shown, static)


def test_no_text_of_a_run_ends_the_script_that_holds_it(tmp_path: Path, static: Path) -> None:
    hostile = "</script><script>alert(1)</script><!-- \u2028"
    write_events(tmp_path / "run", [Event(1e9, 0, step(1, 2)), Event(1e9, 0, Message("error", hostile))])
    export_run(tmp_path / "run", tmp_path / "run.html", static)
    text = (tmp_path / "run.html").read_text()
    assert "alert(1)</script>" not in text
    assert "<!--" not in text
    data = _data(text)
    assert isinstance(data["answers"], dict)
    marks = data["answers"][f"/api/run/{data['id']}/curves?x=step"]["marks"]
    assert any(hostile in mark["text"] for mark in marks)


def test_the_content_policy_names_each_script_and_style_by_its_hash_and_no_address(static: Path) -> None:
    text = page_in_one_file("{}", static)
    match = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert match
    policy = match[1].replace("&#x27;", "'")
    for tag in ("script", "style"):
        for body in re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", text, re.DOTALL):
            digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
            assert f"'sha256-{digest}'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    assert "/static/" not in text


def test_modules_find_each_other_by_the_import_map(static: Path) -> None:
    text = page_in_one_file("{}", static)
    match = re.search(r'<script type="importmap">(.*?)</script>', text)
    assert match
    imports = json.loads(match[1])["imports"]
    assert imports.keys() == {"phalanx/main.js", "phalanx/a.js", "phalanx/vendor/plot.js"}
    main = base64.b64decode(imports["phalanx/main.js"].partition("base64,")[2]).decode()
    assert 'from "phalanx/vendor/plot.js"' in main
    assert 'from "phalanx/a.js"' in main


def test_a_folder_of_several_runs_is_refused(tmp_path: Path, static: Path) -> None:
    crashed(tmp_path / "runs" / "a")
    crashed(tmp_path / "runs" / "b")
    with pytest.raises(ExportError, match="2 runs"):
        export_run(tmp_path / "runs", tmp_path / "x.html", static)


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, static: Path) -> None:
    with pytest.raises(ExportError, match="nowhere"):
        export_run(crashed(tmp_path / "run"), tmp_path / "nowhere" / "x.html", static)
