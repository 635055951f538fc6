"""Export of one run's page to a single HTML file that needs no server and no network: to send, archive, or attach to
a ticket.

The file has the scripts and styles of the page, and the responses of a server: ``window.__PHALANX_EXPORT__ = {"id":
ID, "written": unix seconds, "answers": {KEY: JSON}}``. A key is the path of the request, such as
``/api/run/ID/goodput``, with the one parameter that selects a response: ``/api/run/ID/curves?x=step`` (and tokens,
flops, time; all curves of the run in one response), ``/api/run/ID/ranks?column=compute_s``, whose numbers are
``values_base64`` beside the header, ``/api/run/ID/layers?column=FIGURE`` and ``/api/run/ID/profile/NAME``. The page marks missing responses as not in the
file.

Responses are bounded: curves to 2,000 points, logs to the last thousand groups, the total to 48 MB. Omitted parts are
listed under ``left_out``.

The modules of the page cannot be separate files, so each is a ``data:`` URL in an import map, under
``phalanx/NAME.js``. The file's content policy allows only these, and its own scripts and styles by their SHA-256.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

import msgspec

from phalanx.run.directory.files import write_atomically
from phalanx_watch.page import view_ranks
from phalanx_watch.page.http import PageRequestError, Parameters, json_bytes
from phalanx_watch.page.runs import PageRuns, RunPlace
from phalanx_watch.page.view_curves import AXES, curves_view, exported_figures, layers_view
from phalanx_watch.page.view_fleet import fleet_view, goodput_view
from phalanx_watch.page.view_run import checkpoints_view, logs_view, samples_view, summary, why_view

STATIC = Path(__file__).parent / "static"
MOST_BYTES = 48 << 20
_READING_S = 600.0
_POINTS = "2000"
_IMPORT = re.compile(r"""(\bfrom\s+|\bimport\s+)(["'])\./([A-Za-z0-9_./-]+\.js)\2""")
_STYLE = re.compile(r'<link rel="stylesheet" href="/static/([A-Za-z0-9_./-]+)"\s*/?>')
_SCRIPT = re.compile(r'<script type="module" src="/static/([A-Za-z0-9_./-]+)"></script>')
_ICON = re.compile(r'href="/static/([A-Za-z0-9_./-]+\.svg)"')


class ExportError(RuntimeError):
    """A run's page cannot be exported. The message has the reason."""


def export_run(run_dir: Path, file: Path, static: Path = STATIC) -> int:
    """Write the page of the run in ``run_dir`` into ``file`` and return its size in bytes. Raises ``ExportError``, also if the
    folder has several runs."""
    runs = PageRuns([run_dir])
    places = runs.places()
    if len(places) != 1:
        raise ExportError(f"{run_dir} holds {len(places)} runs; give the directory of one")
    content = exported(runs, places[0], static)
    try:
        write_atomically(file, content)
    except OSError as error:
        raise ExportError(f"cannot write {file}: {error.strerror}; give another file") from error
    return len(content)


def exported(runs: PageRuns, place: RunPlace, static: Path = STATIC) -> bytes:
    """Return the page of a run as one HTML file; reads the run for at most ``_READING_S`` first.

    Responses that do not fit into ``MOST_BYTES`` are left out, and listed in it. Raises ``ExportError`` if the page's
    own files are missing.
    """
    series = runs.series(place)
    until_s = time.monotonic() + _READING_S
    while series.unread is not None and time.monotonic() < until_s:
        series.refresh()
    answers: dict[str, msgspec.Raw] = {}
    left_out: list[str] = []
    room = MOST_BYTES
    for key, answer in _answers(runs, place):
        encoded = json_bytes(answer)
        if len(encoded) > room:
            left_out.append(key)
            continue
        room -= len(encoded)
        answers[key] = msgspec.Raw(encoded)
    data = {"id": place.id, "written": time.time(), "answers": answers, "left_out": left_out}
    try:
        return page_in_one_file(json_bytes(data).decode(), static).encode()
    except OSError as error:
        raise ExportError(f"{error.filename}: {error.strerror}; install Phalanx again") from error


def _answers(runs: PageRuns, place: RunPlace) -> Iterator[tuple[str, object]]:
    """Yield the page's responses by key, the most important first: summary, views, curves, logs, ranks, layers, profiles."""
    base = f"/api/run/{place.id}"
    plain = Parameters({})
    # Only the run's own row of the list: a recipient of the file must not see other runs.
    yield from _answer("/api/runs", lambda: {"folders": [], "runs": [asdict(runs.row(place))]})
    views = {
        "": summary,
        "/goodput": goodput_view,
        "/fleet": fleet_view,
        "/checkpoints": checkpoints_view,
        "/samples": samples_view,
        "/why": why_view,
    }
    for path, view in views.items():
        yield from _answer(f"{base}{path}", partial(view, runs, place, plain))
    for axis in AXES:
        query = Parameters({"names": "all", "x": axis, "points": _POINTS})
        yield from _answer(f"{base}/curves?x={axis}", partial(curves_view, runs, place, query))
    query = Parameters({"grouped": "1", "last": "1000"})
    yield from _answer(f"{base}/logs", partial(logs_view, runs, place, query))
    for column in view_ranks.HEAT_COLUMNS:
        yield from _answer(
            f"{base}/ranks?column={column}", partial(view_ranks.heat_table, runs, place, column)
        )
    yield from _answer(f"{base}/layers", partial(layers_view, runs, place, plain))
    for figure in exported_figures(runs, place):
        query = Parameters({"column": figure})
        yield from _answer(f"{base}/layers?column={figure}", partial(layers_view, runs, place, query))
    yield from _answer(f"{base}/profiles", partial(view_ranks.profiles_view, runs, place, plain))
    for name in view_ranks.profile_names(place):
        yield from _answer(f"{base}/profile/{name}", partial(view_ranks.profile_summary, place, name))


def _answer(key: str, make: Callable[[], object]) -> Iterator[tuple[str, object]]:
    """Yield one response; none if a server would return an error."""
    try:
        answer = make()
    except PageRequestError:
        return
    yield key, answer


def page_in_one_file(data: str, static: Path = STATIC) -> str:
    """Return the page with its styles, scripts, icon and ``data`` (JSON) in one text, whose content policy admits
    only these.

    Raises ``OSError`` if a file of the page is missing.
    """
    page = (static / "index.html").read_text()
    hashes: dict[str, list[str]] = {"script": [], "style": []}

    def inline(tag: str, attributes: str, text: str) -> str:
        """Return an element with ``text``, in which its own end tag is escaped, and record the text's hash."""
        text = text.replace("</", "<\\/") if tag == "script" else text.replace("</", "<\\2f ")
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        hashes[tag].append(f"'sha256-{digest}'")
        return f"<{tag}{attributes}>{text}</{tag}>"

    def style(match: re.Match[str]) -> str:
        return inline("style", "", (static / match[1]).read_text())

    def script(match: re.Match[str]) -> str:
        """Return the data, an import map of the modules as data URLs, and the import of the page's script."""
        imports = {f"phalanx/{name}": _data_url(text) for name, text in _modules(static, match[1]).items()}
        return "\n".join(
            (
                inline("script", "", f"window.__PHALANX_EXPORT__ = {_in_script(data)};"),
                inline("script", ' type="importmap"', msgspec.json.encode({"imports": imports}).decode()),
                inline("script", ' type="module"', f'import "phalanx/{match[1]}";'),
            )
        )

    def icon(match: re.Match[str]) -> str:
        return f'href="{_data_url((static / match[1]).read_text(), "image/svg+xml")}"'

    page = _ICON.sub(icon, _SCRIPT.sub(script, _STYLE.sub(style, page)))
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src data: {' '.join(hashes['script'])}",
            f"style-src {' '.join(hashes['style'])}",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    meta = f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy, quote=True)}" />'
    return page.replace("<head>", f"<head>\n    {meta}", 1)


def _in_script(data: str) -> str:
    """Escape JSON for a script element: no text of a run can end the script or begin a comment."""
    return data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _modules(static: Path, main: str) -> dict[str, str]:
    """Return ``main`` and the modules that it imports, by path, with their imports renamed to the import map."""
    texts: dict[str, str] = {}
    due = [main]
    while due:
        name = due.pop()
        if name in texts:
            continue
        folder = Path(name).parent

        def renamed(match: re.Match[str], folder: Path = folder) -> str:
            path = (folder / match[3]).as_posix()
            due.append(path)
            return f"{match[1]}{match[2]}phalanx/{path}{match[2]}"

        texts[name] = _IMPORT.sub(renamed, (static / name).read_text())
    return texts


def _data_url(text: str, kind: str = "text/javascript") -> str:
    return f"data:{kind};base64,{base64.b64encode(text.encode()).decode()}"
