"""Benchmarks: what this machine can do and what kvtier makes of it, measured in turn in one run."""
