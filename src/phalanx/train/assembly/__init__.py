"""A run put together on one rank: model, optimizer, state and data."""
