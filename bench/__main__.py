"""List the benches with the memory and time that they need: ``python -m bench``; ``--write`` writes the table of docs/reference/benches.md."""

import argparse
from pathlib import Path

from bench.catalog import BENCHES
from bench.running import usage_line

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "benches.md"
HEAD = "| command | measures | GiB | minutes |\n|---|---|---|---|\n"


def table() -> str:
    """Return the benches as a table in Markdown."""
    return HEAD + "".join(
        f"| `python -m bench.{name}` | {needs.summary} | {needs.memory_gib:g} | {needs.minutes:g} |\n"
        for name, needs in BENCHES.items()
    )


def main() -> None:
    """Print one line for each bench."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        text = PAGE.read_text()
        PAGE.write_text(text[: text.index(HEAD)] + table())
        return
    for name, needs in BENCHES.items():
        print(f"python -m bench.{name:25} {needs.summary} ({usage_line(needs)})")


if __name__ == "__main__":
    main()
