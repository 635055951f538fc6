"""Commands that plan: layouts, hardware, models, and what a run file means."""
