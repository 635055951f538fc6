"""The terminal's tables of ``phalanx plan``."""
