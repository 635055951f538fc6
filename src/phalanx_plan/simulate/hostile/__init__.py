"""Small hostile worlds: every possible fault strikes, and the core must keep its invariants."""
