"""The specification of hit density, without regard to cost: the reference that the policy must equal."""

import math
from typing import Any

from kvtier.policies import Policy
from kvtier.policies.returns import Classes

STEPS = 17
WIDTHS = [1] + [2**step for step in range(STEPS - 1)]
TRUSTS = {"class": 50, "future": 10, "kind": 100, "pause": 50, "length": 50, "superseded": 50}
FACTORS = {0: 1.0, 1: 2.0, 2: 2.0, 3: 2.0, 4: 2.0, 5: 4.0}


class NaiveRun:
    """Keys, head first, of which it owns those that name it as their owner."""

    def __init__(self, keys, opened_at):
        self.keys, self.size, self.opened_at = list(keys), len(keys), opened_at
        self.turn = self.pause = self.shared = 0
        self.path = None  # None while it is open.
        self.step = self.born = 0
        self.entered = 0  # Position in the order of entering a step.


class NaiveStatistics:
    """Counts by label and step; a label's include those of all labels that begin with it."""

    def __init__(self):
        self.now = 0
        self.runs = self.keys = 0.0
        self.known, self.hits, self.risks = [()], {(): [0.0] * STEPS}, {(): [0.0] * STEPS}
        self.chances, self.worth = {}, {}

    def count(self, path, step, keys, *, hit):
        for length in range(len(path) + 1):
            self.risks[path[:length]][step] += keys
            self.hits[path[:length]][step] += keys * hit

    def began(self, path, keys):
        for length in range(1, len(path) + 1):
            if path[:length] not in self.known:
                self.known.append(path[:length])
                self.hits[path[:length]] = [0.0] * STEPS
                self.risks[path[:length]] = [0.0] * STEPS
        self.runs += 1
        self.keys += keys
        if path not in self.worth or self.now - self.worth[path][0] >= 128:
            chances = self.chances_of(path)
            self.worth[path] = self.now, [round(self.best_ratio(chances, step), 12) for step in range(STEPS)]

    def chances_of(self, path):
        if path not in self.chances or self.now - self.chances[path][0] >= 128:
            if not path:
                above, trust = [0.05] * STEPS, 500
            else:
                sort, name = path[-1]
                above, trust = self.chances_of(path[:-1]), TRUSTS[sort]
                factor = FACTORS[int(str(name))] if sort == "kind" else 0.1 if sort == "superseded" else 1.0
                above = [min(0.9, chance * factor) for chance in above] if factor != 1 else above
            weight = trust * (self.keys / self.runs)
            hits, risks = self.smoothed(self.hits[path]), self.smoothed(self.risks[path])
            chances = [(hits[step] + weight * above[step]) / (risks[step] + weight) for step in range(STEPS)]
            self.chances[path] = self.now, chances
        return self.chances[path][1]

    def smoothed(self, counts):
        last = len(counts) - 1
        return [(counts[max(0, at - 1)] + 2 * counts[at] + counts[min(last, at + 1)]) / 4 for at in range(len(counts))]

    def best_ratio(self, chances, begin):
        best = hits = wait = 0.0
        survival = 1.0
        for step in range(begin, STEPS):
            hits += survival * chances[step]
            wait += survival * WIDTHS[step] * (1 - chances[step] / 2)
            survival *= 1 - chances[step]
            best = max(best, hits / wait)
        return best

    def tick(self):
        self.now += 1
        if self.now % 4_096 == 0:
            self.runs /= 2
            self.keys /= 2
            for counts in (*self.hits.values(), *self.risks.values()):
                counts[:] = [count / 2 for count in counts]


class NaiveDensity(Policy[Any]):
    """One list of runs, searched from end to end by every call."""

    def __init__(self, capacity, *, warm_up_requests=512):
        self.capacity, self.warm_up_requests, self.owner = capacity, warm_up_requests, {}
        self.open, self.given_up = [], 0
        self.settled = []  # In the order in which they began to age, as are ghosts.
        self.ghosts, self.statistics, self.entries = [], NaiveStatistics(), 0
        self.classes = Classes()

    def owned(self, run):
        return [key for key in run.keys if self.owner.get(key) is run]

    def give(self, keys, run):
        for key in keys:
            self.owner[key] = run

    def opened(self, run):
        self.give(run.keys, run)
        self.open.append(run)
        if len(self.open) > 4_096:
            self.give_up(self.open[0])
            if self.given_up >= 4_096:
                self.warm_up_requests += 1
                self.tick()

    def insert(self, keys):
        if not keys:
            return
        run = NaiveRun(keys, self.statistics.now)
        for key in keys:
            for head, ghost in list(self.ghosts):
                if head == key and ghost.path is not None:
                    self.statistics.count(ghost.path, ghost.step, ghost.size, hit=True)
                    run.turn, run.pause = ghost.turn + 1, 1 + min(6, ghost.step // 2)
                    self.ghosts.remove((head, ghost))
        self.opened(run)

    def touch(self, keys):
        if not keys:
            return
        run, deepest = NaiveRun(keys, self.statistics.now), self.owner[keys[-1]]
        mine = [key for key in keys if self.owner[key] is deepest]
        goes_on = deepest.path is not None and not deepest.shared and len(self.owned(deepest)) - len(mine) <= 1
        if goes_on:
            run.turn, run.pause = deepest.turn + 1, 1 + min(6, deepest.step // 2)
        run.shared = len(keys) - len(mine) if goes_on else len(keys)
        self.take(keys, used=True)
        if goes_on and self.owned(deepest):
            deepest.size = len(self.owned(deepest))
            deepest.path = (("superseded", None),)
            self.statistics.began(deepest.path, deepest.size)
            self.enter(deepest)
        self.opened(run)

    def take(self, keys, *, used):
        for run in list({id(self.owner[key]): self.owner[key] for key in keys}.values()):
            taken = sum(self.owner[key] is run for key in keys)
            left = len(self.owned(run)) - taken
            if used and run.path is not None:
                self.statistics.count(run.path, run.step, taken if left else run.size, hit=True)
            run.size -= taken
            if not left:
                (self.open if run.path is None else self.settled).remove(run)
        for key in keys:
            del self.owner[key]

    def rank(self, keys, hint=None):
        if hint is None:
            self.end(keys, ())
            return
        self.warm_up_requests, said = min(self.warm_up_requests, 128), []
        number = self.classes.number(hint.class_)[0] if hint.class_ else None
        if number is not None:
            said.append(("class", number))
        if hint.over:
            said.append(("future", "over"))
        elif hint.returns_in_s is not None:
            said.append(("future", round(2 * math.log(min(max(1.0, hint.returns_in_s), 1e6)))))
        self.end(keys, tuple(said))

    def end(self, keys, hints):
        if not keys:
            return
        runs = list({id(self.owner[key]): self.owner[key] for key in keys}.values())
        opened = [run for run in runs if run.path is None]
        if not opened and not hints and all(run.step == 0 for run in runs):
            return
        self.tick()
        turn, pause = max((run.turn, run.pause) for run in opened or runs)
        shared = (
            max(run.shared for run in opened) if opened else sum(len(self.owned(run)) for run in runs if run.shared)
        )
        self.take(keys, used=False)
        length = min(4, (len(keys).bit_length() - 1) // 2)
        kind = turn if turn < 3 else 3 if turn < 6 else 4
        knows_future = any(sort == "future" for sort, _ in hints)
        past = () if knows_future else (("pause", pause), ("length", length))
        for part, which in ((keys[shared:], kind), (keys[:shared], 5)):
            if part:
                run = NaiveRun(part, self.statistics.now)
                run.turn, run.pause, run.shared = turn, pause, int(which == 5)
                self.give(part, run)
                self.settle(run, (*hints, ("kind", which), *past))

    def settle(self, run, path):
        run.path, run.born = path, self.statistics.now
        self.statistics.began(path, run.size)
        self.settled.append(run)
        self.enter(run)

    def enter(self, run):
        self.entries += 1
        run.entered = self.entries

    def give_up(self, run):
        self.open.remove(run)
        self.given_up += 1
        run.shared = 0
        self.settle(run, (("kind", 0), ("pause", 0), ("length", 0)))

    def tick(self):
        self.statistics.tick()
        now = self.statistics.now
        self.given_up = 0
        for run in list(self.open):
            if run.opened_at < now - 1_024:
                self.give_up(run)
        for step in range(STEPS - 1):
            if now % (1 if step < 5 else 8 if step < 9 else 64) == 0:
                for run in [*self.settled, *(ghost for _, ghost in self.ghosts)]:
                    if run.step == step and now - run.born >= 2**step and run.path is not None:
                        self.statistics.count(run.path, step, run.size, hit=False)
                        run.step = step + 1
                        self.enter(run)

    def coldest_first(self):
        order = list(self.settled)
        if self.statistics.now >= self.warm_up_requests:
            order.sort(key=lambda run: (self.place(run.path, run.step), run.entered))
        return order

    def place(self, path, step):
        return self.statistics.worth[path][1][step], self.statistics.known.index(path), step

    def evict(self, count, keep, incoming=()):
        order = [self.owned(run)[::-1] for run in self.coldest_first()]
        victims = []
        for keys in order:
            victims += keys[: next((at for at, key in enumerate(keys) if keep(key)), len(keys))]
        if len(victims) < count:
            order += [self.owned(run)[::-1] for run in self.open]
            victims = [key for keys in order for key in keys if not keep(key)]
        if len(victims) < count:
            return None
        for key in victims[:count]:
            run = self.owner.pop(key)
            if not self.owned(run):
                if run.path is None:
                    self.open.remove(run)
                else:
                    self.settled.remove(run)
                    self.ghosts.append((key, run))
        while sum(ghost.size for _, ghost in self.ghosts) > 4 * self.capacity:
            del self.ghosts[0]
        return victims[:count]

    def remove(self, keys):
        self.take(keys, used=False)
