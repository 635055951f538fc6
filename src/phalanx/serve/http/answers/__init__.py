"""Admitted requests on their way to their clients: tokens become text, events and whole answers."""
