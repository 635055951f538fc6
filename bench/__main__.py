"""List the benches with the memory and time that they need: ``python -m bench``."""

from bench.catalog import BENCHES
from bench.running import usage_line


def main() -> None:
    """Print one line for each bench."""
    for name, needs in BENCHES.items():
        print(f"python -m bench.{name:24} {needs.summary}\n{'':16}{usage_line(needs)}")


if __name__ == "__main__":
    main()
