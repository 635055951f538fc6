"""The life of a rank: trained, saved, ended."""
