"""Programs for this repository that are not shipped."""
