"""Files of text in the usual formats: what a file is, the spans into which it can be cut, and the documents of a span."""
