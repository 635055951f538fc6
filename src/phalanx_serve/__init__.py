"""Text generation and serving from trained weights."""
