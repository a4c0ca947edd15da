"""What kvtier uses of vLLM (0.32 and 0.33), declared: vLLM itself is not needed to check types."""

__version__: str
