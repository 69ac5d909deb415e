"""Comparisons of many runs: what to train, what is done already, and what came of it."""
