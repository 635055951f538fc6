"""Checks of the source and the documents that ruff and mypy do not have; `make lint` runs them."""
