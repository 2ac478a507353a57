"""Tasks: rows, reward functions, environments and the embedded shop."""
