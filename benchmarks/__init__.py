"""Measurements side by side with peers and with the machine's own matmul speed: `python -m benchmarks`."""
