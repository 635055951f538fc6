"""Commands over many runs: list, show, compare, label and remove them, and run one again."""
