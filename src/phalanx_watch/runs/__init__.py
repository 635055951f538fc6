"""Many runs at once: their list, their labels, what two of them differ in, what was recorded of one, and doing it again."""
