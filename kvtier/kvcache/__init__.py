"""KV caches: how tensors lie in memory, and copies between them and rows. Needs torch."""

from importlib import import_module

try:
    import_module("torch")  # Here, so that whatever is imported below says what to do.
except ModuleNotFoundError as error:
    needed = "kvtier.kvcache needs torch; install it with: pip install 'kvtier[torch]'"
    raise ModuleNotFoundError(needed, name="torch") from error
