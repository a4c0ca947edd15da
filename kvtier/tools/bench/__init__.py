"""Benchmarks of tiers, each next to its limit, measured in turn in one run."""
