"""One node: its agent, its workers, and the links between them."""
