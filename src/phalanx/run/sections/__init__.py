"""The tables of the run file, each with its fields: types, defaults, ranges, owners, and a sentence for each."""
