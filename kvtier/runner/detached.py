"""The start of a runner as no one's child: `python -m kvtier.runner.detached`, with `kvtier.runner.child`'s arguments.

An LLM engine that ends may kill all its descendants at once, as vLLM does. A runner that is none ends by itself once
its owner has: with its stores in flight written, and its tiers closed. It imports nothing before the fork, which is
therefore cheap. The first message to the owner is a descriptor of the new process: an id could be another's by then.
"""

import os
import socket
import sys


def main() -> None:
    if os.fork():
        os._exit(0)
    pidfd = os.pidfd_open(os.getpid())
    with socket.socket(fileno=os.dup(int(sys.argv[1]))) as owner:
        socket.send_fds(owner, [b"%d" % os.getpid()], [pidfd])
    os.close(pidfd)
    from kvtier.runner import child

    child.main()


if __name__ == "__main__":
    main()
