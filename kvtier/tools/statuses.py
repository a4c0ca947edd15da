"""Exit statuses: every way in which a command ends, written once. The page "Command line" explains each.

Plain numbers: `cli` needs them before it may import anything that takes time.
"""

DONE = 0
DATA_WRONG = 1  # A wrong byte, a corrupt chunk, or a file that could not be read: whoever reads the status is to look.
REFUSED = 2  # As for a wrong option: mend the call, then try again.
FAILED = 3  # Of the machine: mend it, then try the same call again.
FAULT = 70  # Of kvtier's own, as sysexits.h has it.
INTERRUPTED = 130  # As shells have it: 128 and the number of the signal.
UNREAD = 141  # Likewise: nobody reads the output any more.
