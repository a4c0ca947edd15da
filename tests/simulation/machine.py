"""A simulated machine: processes, their threads and their sockets, in one loop of virtual time.

The code of engines and keepers runs as it is, on memory that is real. A thread's call takes virtual time. A message
takes virtual time, too, is cut at random, and may be the one at which its sender or its receiver is killed or stopped.
"""

import asyncio
import os
import queue
import socket
import threading
from array import array
from collections import Counter, deque
from concurrent.futures import Future
from contextlib import suppress
from contextvars import Context, ContextVar, copy_context
from functools import partial

from kvtier.backend import Lanes
from kvtier.errors import BackendClosed, KVTierError
from kvtier.testing.virtual_time import VirtualTimeLoop
from tests.simulation.turns import TURNS_AT_ONE_MOMENT_MAX

BUFFER_BYTES = 4_096  # A keeper's socket takes so much; the rest waits.
HANG_S = 30.0
PROCESS: ContextVar["Process"] = ContextVar("process")


class Killed(BackendClosed):
    """The process that called was killed."""


class MachineLoop(VirtualTimeLoop):
    """A loop in virtual time that knows the simulated sockets, and which process a task belongs to."""

    def __init__(self):
        super().__init__(iterations_at_one_moment_max=TURNS_AT_ONE_MOMENT_MAX)
        self.ends = {}  # By the descriptor of a process: what it is of, and what is called at its end.

    def add_reader(self, what, callback, *args):
        if isinstance(what, int):
            process = self.ends[what][0]
            self.ends[what] = process, partial(PROCESS.get().begin_soon, callback, *args)
            process.tell(what)
        else:
            what.reader = partial(callback, *args)
            what.wake()

    def remove_reader(self, what):
        if isinstance(what, int):
            self.ends.pop(what, None)
        else:
            what.reader = None

    def add_writer(self, what, callback, *args):
        what.writer = partial(callback, *args)
        what.peer.wake()

    def remove_writer(self, what):
        what.writer = None

    def run_in_executor(self, executor, call, *args):
        return asyncio.wrap_future(executor.submit(call, *args), loop=self)

    def _new_task(self, loop, coroutine, **options):
        task = super()._new_task(loop, coroutine, **options)
        process = options["context"].get(PROCESS) if "context" in options else PROCESS.get(None)
        if process is not None:
            process.tasks[task] = None
            task.add_done_callback(process.tasks.pop)
        return task


class Machine:
    """The loop, dice and faults that the processes of one machine share."""

    def __init__(self, dice, faults):
        """`faults`: by the number of a message, what happens to which side of it."""
        self.loop, self.dice = asyncio.get_running_loop(), dice
        self.messages, self.met, self.burials = 0, [], []
        self.faults = faults
        self.slow_s, self.hangs = dice.choice((0.0005, 0.001, 0.05)), dice.choice((0.0, 0.0, 0.01))

    def latency_s(self):
        return self.dice.choice((0.0, 0.0001, self.slow_s))

    def end_faults(self):
        self.faults.clear()
        self.hangs = 0.0


class Process:
    """A process: it can be stopped, goes on, and ends."""

    def __init__(self, machine, name, bury):
        self.machine, self.name, self._bury = machine, name, bury
        self.is_cut = self.is_dying = self.is_gone = self.is_buried = False  # Cut: nothing leaves it any more.
        self.stops = 0
        self.tier, self.keeper, self.storing = None, None, Counter()
        self.tasks, self.ends, self.holders, self.running = {}, [], [], {}
        self._waiting = []  # Callbacks of a stopped process.
        self.context = copy_context()
        self.context.run(PROCESS.set, self)

    def begin(self, work):
        return self.machine.loop.create_task(work, name=self.name, context=self.context)

    def begin_soon(self, call, *args):
        self.machine.loop.call_soon(call, *args, context=self.context)

    def when_running(self, call):
        """Call it now, or when the process goes on; never if it has ended."""
        if self.stops:
            self._waiting.append(call)
        elif not self.is_dying:
            call()

    def stop(self, seconds):
        self.stops += 1
        self.machine.loop.call_later(seconds, self._go_on)

    def _go_on(self):
        self.stops -= 1
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            self.begin_soon(self.when_running, call)
        for end in self.ends:
            end.wake()

    def kill(self):
        """End it. What its threads are at may still be done, until its descriptors show that it is gone."""
        if self.is_dying:
            return
        machine, self.is_dying = self.machine, True
        for end in self.ends:
            end.close()
        dies_s = machine.dice.choice((0.0, machine.slow_s, 1.0, 1.0))
        for call in list(self.running.values()):
            if machine.dice.random() < 0.8:
                machine.met.append(("late call", self.name.split()[0]))
                machine.loop.call_later(machine.dice.uniform(0, dies_s), _unheard, call, context=self.context)
        machine.loop.call_later(dies_s, self._end)

    def _end(self):
        self.is_gone = True
        for end in self.ends:  # A thread may have opened another one.
            end.close()
        for descriptor in list(self.machine.loop.ends):
            self.tell(descriptor)
        for job in self.running:
            job.set_exception(Killed())
        self.running.clear()
        self.machine.burials.append(self.machine.loop.create_task(self._buried(), context=Context()))

    async def _buried(self):
        while self.tasks:
            for task in self.tasks:
                task.cancel()
            await asyncio.wait(list(self.tasks))
        self._bury(self)
        for holder in self.holders:  # The kernel closes what they have.
            holder.forked()
        self.is_buried = True

    def tell(self, descriptor):
        """Tell whoever waits for this process's end by a descriptor of it."""
        of, call = self.machine.loop.ends.get(descriptor, (None, None))
        if of is self and self.is_gone and call is not None:
            self.machine.loop.call_soon(self._tell, descriptor, call)

    def _tell(self, descriptor, call):
        if self.machine.loop.ends.get(descriptor) == (self, call):
            call()

    def descriptor(self):
        """Return a descriptor of this process."""
        number = os.open(os.devnull, os.O_RDONLY)
        self.machine.loop.ends[number] = self, None
        return number


def _unheard(call):
    with suppress(OSError, KVTierError):  # The waiting task is dead.
        call()


class End:
    """One end of a connection: what `wire.Link` needs of a socket."""

    def __init__(self, machine, process):
        self.machine, self.process, self.peer = machine, process, None
        self.reader = self.writer = None
        self.closed = False
        self._inbox = deque()  # What has come or comes: when, bytes, descriptors. None: the end.
        self._comes_s = 0.0
        self._timer = None
        process.ends.append(self)

    def setblocking(self, _):
        pass

    def getsockopt(self, *_):
        return self.peer.process.descriptor()

    def sendmsg(self, buffers, ancillary=(), *_):
        content, process, loop = b"".join(buffers), self.process, self.machine.loop
        if self.closed or self.peer.closed:
            raise BrokenPipeError
        size_bytes = BUFFER_BYTES if process.name == "keeper" else 1 << 20  # What an engine says is on its way at once.
        room = size_bytes - sum(len(item[1]) for item in self.peer._inbox if item[1] is not None)
        if room <= 0:
            raise BlockingIOError
        cut = self.machine.dice.random() < 0.05
        content = content[: min(room, self.machine.dice.randint(1, len(content)) if cut else room)]
        sent = len(content) * (not process.is_cut)
        self.machine.messages += 1
        fault = self.machine.faults.pop(self.machine.messages, None)
        if fault is not None and sent:
            side, act = fault
            victim = process if side == "sender" else self.peer.process
            self.machine.met.append((act, victim.name.split()[0]))
            if act == "stop":
                victim.stop(self.machine.dice.choice((0.01, 1.0, 8.0, 30.0)))
            elif side == "sender":
                sent, victim.is_cut = self.machine.dice.randint(0, len(content)), True
                loop.call_soon(victim.kill)
            else:
                loop.call_later(self.machine.dice.uniform(0, 3 * self.machine.slow_s), victim.kill)
        if sent:
            self.peer.put(content[:sent], [os.dup(fd) for _, _, fds in ancillary for fd in fds])
        return len(content)

    def shutdown(self, _):
        self.peer.put(None)

    def recvmsg(self, *_):
        if self.closed:
            raise OSError
        if not self._is_due():
            raise BlockingIOError
        _, content, descriptors = self._inbox[0]
        if content is None:
            return b"", [], 0, None
        self._inbox.popleft()
        self.wake()
        return content, [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors).tobytes())], 0, None

    def put(self, content, descriptors=()):
        self._comes_s = max(self._comes_s, self.machine.loop.time() + self.machine.latency_s())
        self._inbox.append((self._comes_s, content, descriptors))
        self.wake()

    def close(self):
        if not self.closed:
            self.closed = True
            for _, _, descriptors in self._inbox:
                for fd in descriptors:
                    os.close(fd)
            self._inbox.clear()
            self.peer.put(None)

    def wake(self):
        """Schedule the reader if something is to be read, and the peer's writer if there is room."""
        waits = self._timer is not None or self.reader is None or self.closed or self.process.stops
        if self._inbox and not waits:
            self._timer = self.machine.loop.call_at(self._inbox[0][0], self._ready, context=self.process.context)
        if self.peer is not None and self.peer.writer is not None and not self._inbox:
            self.peer.process.begin_soon(self.peer._writable)

    def _is_due(self):
        return bool(self._inbox) and self._inbox[0][0] <= self.machine.loop.time()

    def _ready(self):
        self._timer = None
        if self.reader is not None and self._is_due() and not self.process.stops and not self.closed:
            self.reader()
            self.wake()

    def _writable(self):
        if self.writer is not None:
            self.process.when_running(self.writer)


class Listener(End):
    """Where connections wait for a process that accepts them."""

    def accept(self):
        if not self._is_due():
            raise BlockingIOError
        return self._inbox.popleft()[1], None

    def close(self):
        if not self.closed:
            self.closed = True
            for _, end, _ in self._inbox:
                end.close()
            self._inbox.clear()


class SimulatedLanes(Lanes):
    """Threads of a simulated process: their calls wait, and take time. Those of a killed process never return."""

    def __init__(self, count, name):
        self.count, self._closed, self._open = count, False, set()
        self._lock, self._queue = threading.Lock(), queue.SimpleQueue()
        self._ends = [Future() for _ in range(count)]
        self._idle = list(self._ends)
        self._process = PROCESS.get()
        self._machine = self._process.machine

    def start(self, calls):
        if self._process.is_dying:
            raise Killed
        jobs = super().start(calls)
        self._serve()
        return jobs

    def shutdown(self, wait=True, *, cancel_futures=False):
        super().shutdown(wait=False, cancel_futures=cancel_futures)
        self._serve()

    def _serve(self):
        with suppress(queue.Empty):
            while self._idle:
                job, end = self._queue.get_nowait(), self._idle.pop()
                if job is None:
                    end.set_result(None)
                else:
                    self._later(partial(self._begin, job, end))

    def _later(self, call):
        machine = self._machine
        due_s = HANG_S if machine.dice.random() < machine.hangs else machine.latency_s()
        machine.loop.call_later(due_s, self._process.when_running, call, context=self._process.context)

    def _begin(self, job, end):
        if job.set_running_or_notify_cancel():
            self._process.running[job] = job._call
            self._later(partial(self._finish, job, end))
        else:
            self._free(end)

    def _finish(self, job, end):
        del self._process.running[job]
        call, job._call = job._call, None
        try:
            result = call()
        except Exception as error:  # noqa: BLE001  # Raised in the waiting task.
            job.set_exception(error)
        else:
            job.set_result(result)
        self._free(end)

    def _free(self, end):
        self._idle.append(end)
        self._serve()
