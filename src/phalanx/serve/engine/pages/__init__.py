"""Keys and values of a serving engine in pages of 64 tokens: where they lie, in which format, and what each process has of one."""
