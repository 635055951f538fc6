"""Commands that plan: layouts, hardware, models and placements."""
