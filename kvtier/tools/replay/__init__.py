"""Traces in, figures out: readers, a workload generator, the policy study and the replay of the whole engine."""
