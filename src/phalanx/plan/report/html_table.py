"""Tables of the report, in HTML."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

_BEFORE_FIELD = re.compile(r",(?=[a-z_]+=)")


def html_table(head: Sequence[str], rows: Iterable[Sequence[object]], kind: str = "") -> str:
    """A table with a line of headings; ``kind`` is its class in the page's style sheet. Layouts break after a comma."""
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(
        "<tr>"
        + "".join(f"<td>{_BEFORE_FIELD.sub(',<wbr/>', escape(str(cell)))}</td>" for cell in row)
        + "</tr>"
        for row in rows
    )
    return f'<table class="{kind}"><tr>{top}</tr>{body}</table>'
