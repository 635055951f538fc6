"""Commands that train and prepare data."""
