"""The heap that vLLM's imports leave, frozen once: import this when all else is imported.

An engine collects garbage a dozen times between its start and its end, and thaws what was frozen. Nearly all of its
time went through the imports' objects. What engines make is still collected.
"""

import atexit
import gc

gc.collect()
gc.freeze()
atexit.register(gc.unfreeze)  # Or modules in C report at the end what they believe to have leaked.
gc.freeze = gc.unfreeze = lambda: None
