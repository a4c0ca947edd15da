from multiprocessing import get_context

ANSWER_S = 120.0  # torch takes seconds to be imported, and a context as long to be made.
SPAWN = get_context("spawn")  # A fork would inherit a CUDA context that it may not use.


class Child:
    def __init__(self, work, *arguments):
        self._connection, theirs = SPAWN.Pipe()
        self.process = SPAWN.Process(target=work, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()

    def tell(self, word):
        self._connection.send(word)

    def answer(self):
        assert self._connection.poll(ANSWER_S), "the child hangs"
        return self._connection.recv()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.join()
        self._connection.close()
