"""What a run reads: its sources, wherever they lie, as samples of tokens."""
