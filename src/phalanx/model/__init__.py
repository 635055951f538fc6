"""The transformer itself, its known shapes and its counts. Nothing here knows of more than one process."""
