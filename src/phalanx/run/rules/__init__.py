"""Rules that a run file must obey, each refused by its field and with its remedy."""
