"""Small hostile worlds: everything that can fail does, and the core must hold."""
