"""Steps of a preparation: pure functions that change a document, or drop it with a reason."""
