"""Operations on a committed step in any tier: restore, verify, compare, hash, copy, delete by a retention rule."""
