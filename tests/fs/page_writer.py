"""Changes a shared page over and over, until it is killed; a test starts it. Argument: the directory.

Each line of its input begins another life, which is told as `child <pid>`. Each line of a life's output, `changed`,
says that the page was changed some more. Its end is told as `dead`.
"""

import os
import sys

from kvtier_backends.fs.disk.shared_page import SharedPage

LIMIT_BYTES = 1 << 40


def child(directory: str) -> None:
    os.write(1, b"child %d\n" % os.getpid())  # By itself: nothing that it writes may come before.
    shared_page = SharedPage(os.open(directory, os.O_RDONLY | os.O_DIRECTORY), "ledger", b"8 bytes.")
    while True:
        for size_bytes in range(1, 65):
            promised_bytes = shared_page.reserve(2 * size_bytes, LIMIT_BYTES)
            shared_page.settle(promised_bytes or 0, size_bytes)
            shared_page.exchange(size_bytes, 0)
        os.write(1, b"changed\n")


def main(directory: str) -> None:
    for _ in sys.stdin:
        pid = os.fork()
        if pid == 0:
            child(directory)
        os.waitpid(pid, 0)
        os.write(1, b"dead\n")


main(sys.argv[1])
