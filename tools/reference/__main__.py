"""`python -m tools.reference`: write the pages of docs/reference/ that are generated."""

from __future__ import annotations

from tools.reference.pages import FOLDER, PAGES

for name, page in PAGES.items():
    (FOLDER / name).write_text(page(), encoding="utf-8")
    print(f"wrote {FOLDER / name}")
