"""Sections of the run file as dataclasses, with the rules of their own fields."""
