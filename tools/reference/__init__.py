"""The pages of docs/reference/ that are generated from the code; `python -m tools.reference` writes them."""
