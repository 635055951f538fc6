"""KV cache of a serving engine: pages of 64 tokens, their memory and format, and the pages of each running text."""
