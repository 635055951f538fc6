"""What a coordinator finds out about a fault: which rank failed first, and in which collective a fleet hangs."""
