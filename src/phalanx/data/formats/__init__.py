"""Files of text in common formats: their detection, their spans, and the documents of a span."""
