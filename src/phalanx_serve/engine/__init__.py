"""The engine: rows of many requests through one model, in pages, with bits that belong to each request."""
