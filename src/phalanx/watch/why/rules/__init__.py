"""The rules: each looks at what is observed of a run and says what is wrong with it, or nothing."""
