"""Exit statuses of all commands; the page "Command line" explains them. Importing them takes no time."""

DONE = 0
DATA_WRONG = 1  # A wrong byte, a corrupt chunk, or an unreadable file.
REFUSED = 2  # Usage error: correct the call.
FAILED = 3  # I/O or system error: the same call may succeed later.
FAULT = 70  # A bug of kvtier; the number is EX_SOFTWARE of sysexits.h.
INTERRUPTED = 130  # 128 + SIGINT, as in shells.
UNREAD = 141  # 128 + SIGPIPE: nothing reads the output.
