"""Published op orders for two runs of blocks per worker, implemented from the papers without code from ``v``.

An order lists the ops of every stage as (kind, 0, micro-batch, chunk). The stages hold chunks in a V: stage p the
chunks p and 2P - 1 - p, its first and its second run. Orders do not include times.

P stages, M micro-batches.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from swift.schedules.problem import Kind

F, B, W = Kind.F, Kind.B, Kind.W
Op = tuple[int, int, int, int]
Slots = dict[tuple[int, int], int]
"""Slot of each (pass, micro-batch) of a stage."""
Times = tuple[float, float, float, float]
"""(F, B, W of a run, message)."""


@dataclass
class Stage:
    """The ops of a stage, in order, which are appended one micro-batch after another for each run.

    Attributes:
        runs: chunks of the first and of the second run.
        num_microbatches: number of micro-batches, after which further ops of a run are ignored.
        done: number of ops so far, by kind and run.
        order: ops so far.
    """

    runs: tuple[int, int]
    num_microbatches: int
    done: Counter[tuple[int, int]] = field(default_factory=Counter)
    order: list[Op] = field(default_factory=list)

    @classmethod
    def all_of(cls, P: int, M: int) -> list["Stage"]:
        """Creates the empty stages of a pipeline."""
        return [cls((p, 2 * P - 1 - p), M) for p in range(P)]

    def run(self, *ops: tuple[int, int]) -> None:
        """Appends the next op of each (kind, run), unless no micro-batch is left or its previous pass has not run."""
        for kind, run in ops:
            microbatch = self.done[kind, run]
            if microbatch < self.num_microbatches and (kind == F or microbatch < self.done[kind - 1, run]):
                self.order.append((kind, 0, microbatch, self.runs[run]))
                self.done[kind, run] += 1

    def rest_of_w(self) -> None:
        """Appends the remaining Ws whose Bs have run."""
        for run in (1, 0):
            while self.done[W, run] < self.done[B, run]:
                self.run((W, run))


def zbv_in_turn(P: int, M: int) -> list[list[Op]]:
    """ZB-V as libraries run it (arXiv 2401.10241, section 6): a warm-up by stage, then one of each op in turn."""
    stages = Stage.all_of(P, M)
    for p, stage in enumerate(stages):
        stage.run(*[(F, 0)] * (2 * (P - p) - 1), *[(F, 1), (F, 0)] * p, *[(F, 1), (B, 1), (W, 1)] * (P - p))
        while stage.done[F, 1] < M or stage.done[F, 0] < M:
            stage.run((F, 0), (B, 0), (W, 0), (F, 1), (B, 1), (W, 1))
        # In the cool-down the second run's Bs go first as long as the stages after it need them.
        stage.run(*[(B, 0), (B, 1)] * p)
        stage.run(*[(B, 0), (W, 0)] * (P - p))
        while stage.done[B, 0] < M or stage.done[B, 1] < M:
            stage.run((B, 1), (B, 0), (W, 0))
        stage.rest_of_w()
    return [stage.order for stage in stages]


def dualpipe_v(P: int, M: int) -> list[list[Op]] | None:
    """DualPipeV, DualPipe cut in half (arXiv 2412.19437, section 3.2.1): its eight steps; needs 2P micro-batches."""
    stages = Stage.all_of(P, M)
    if M < 2 * P:
        return None
    for p, stage in enumerate(stages):
        after = P - 1 - p
        stage.run(*[(F, 0)] * (2 * after), *[(F, 0), (F, 1)] * (p + 1), *[(B, 1), (W, 1), (F, 1)] * after)
        stage.run(*[(F, 0), (B, 1), (W, 1), (F, 1), (B, 0), (W, 0)] * (M - 2 * P + p + 1))
        stage.run(*[(B, 1), (W, 1), (F, 1), (B, 0), (W, 0)] * after)
        waiting: deque[tuple[int, int]] = deque()
        for turn, run in [(turn, run) for turn in range(p + 1) for run in (1, 0)]:
            stage.run((B, run))
            # In the second half of this step, Ws are postponed.
            if 2 * turn + 1 - run < p + 1:
                stage.run((W, run))
            else:
                waiting.append((W, run))
        for _ in range(after):
            stage.run(waiting.popleft(), (B, 0))
            waiting.append((W, 0))
        stage.run(*waiting)
        stage.rest_of_w()
    return [stage.order for stage in stages]


def interleaved(P: int, M: int) -> list[list[Op]] | None:
    """Interleaved 1F1B (arXiv 2104.04473, section 2.2), two chunks a stage, p and P + p; M is a multiple of P.

    Its stages do not hold their chunks in a V.
    """
    if M % P:
        return None
    orders = []
    for p in range(P):
        # P micro-batches in turn on the first chunk, the same P on the second one.
        turns = [(number // (2 * P) * P + number % P, number // P % 2) for number in range(2 * M)]
        forward = [(F, 0, m, run * P + p) for m, run in turns]
        backward = [(B, 0, m, (1 - run) * P + p) for m, run in turns]
        ahead = min(2 * M, 2 * (P - 1 - p) + P)
        order, waiting = forward[:ahead], deque(backward)
        for op in forward[ahead:]:
            order += [op, waiting.popleft()]
        orders.append([one for op in (*order, *waiting) for one in ([op, (W, *op[1:])] if op[0] == B else [op])])
    return orders


def zbv_by_times(P: int, M: int, times: Times, stash: tuple[float, float], limit: float) -> list[list[Op]] | None:
    """Plans ZB-V as its authors do: the best of four ways to fill bubbles with Ws, each repeated while it improves.

    Args:
        P: number of stages.
        M: number of micro-batches.
        times: durations of a run's F, B and W, and of a message.
        stash: memory that a run holds after F, and after B.
        limit: memory of a stage, in the unit of ``stash``.

    Returns:
        The order whose largest bubble over all stages is smallest, or None if the memory does not suffice.
    """
    best: tuple[float, list[list[Op]]] | None = None
    for fills in ((f, b) for b in (True, False) for f in (True, False)):
        allowed, previous = [-1.0] * P, float("inf")
        while True:
            found = _Filling(P, M, times, stash, limit, fills, allowed)
            if not found.plan():
                break
            longest = max(found.bubble)
            if longest >= previous:
                break
            if best is None or longest < best[0] - 1e-12:
                best = longest, [stage.order for stage in found.stages]
            previous, allowed = longest, found.bubble
    return None if best is None else best[1]


class _Filling:
    """One pass of ``zbv_by_times``: Fs and Bs in turn, and Ws where a stage would wait."""

    def __init__(
        self,
        P: int,
        M: int,
        times: Times,
        stash: tuple[float, float],
        limit: float,
        fills: tuple[bool, bool],
        allowed: list[float],
    ):
        self.P, self.M, self.times, self.limit, self.fills, self.allowed = P, M, times, limit, fills, allowed
        self.change = stash[0], stash[1] - stash[0], -stash[1]
        self.stages = Stage.all_of(P, M)
        self.now, self.held, self.bubble = [0.0] * P, [0.0] * P, [0.0] * P
        self.end: dict[tuple[int, int, int, int], float] = {}
        self.waiting: list[deque[int]] = [deque() for _ in range(P)]
        self.is_short = False

    def plan(self) -> bool:
        """Plans all stages; returns False if memory runs out."""
        P, M = self.P, self.M
        self.warm_up()
        for _ in range(2 * M):
            for p in range(P):
                self.make_room(p, self.change[B])
            first = [p for p in range(P) if self.goes_back(p)]
            for p, run in [(p, 0) for p in reversed(first)] + [(p, 1) for p in range(P) if p not in first]:
                self.fill(B, run, p, fills=run == 0 or self.fills[1])
                self.put(B, run, p)
            for p in range(P):
                run = self.next_f(p)
                if run is not None:
                    self.make_room(p, self.change[F])
                    self.fill(F, run, p, fills=self.fills[0])
                    self.put(F, run, p)
            if self.is_short:
                return False
        for p in range(P):
            while self.waiting[p]:
                self.put_w(p)
        return not self.is_short

    def warm_up(self) -> None:
        P, f = self.P, self.times[F]
        done = [stage.done for stage in self.stages]
        for p in range(P):
            self.put(F, 0, p)
        self.put(F, 1, P - 1)
        for p in range(P - 2, -1, -1):
            arrival = self.end[F, 1, p + 1, 0] + self.times[3]
            while (
                self.held[p] + self.change[F] * (2 + 2 * p) <= self.limit + 1e-9
                and self.now[p] + f <= arrival + 1e-12
                and done[p][F, 0] < self.M
            ):
                for q in range(p + 1):
                    self.put(F, 0, q)
            self.put(F, 1, p)
        run = 0
        for p in range(1, P):
            before, mine = done[p - 1], done[p]
            while (
                mine[F, 0] + mine[F, 1] < before[F, 0] + before[F, 1] or mine[F, 1] <= before[F, 1] < self.M
            ) and not self.is_short:
                for q in range(P - 1, p - 1, -1):
                    self.put(F, run, q)
                run = 1 - run

    def goes_back(self, p: int) -> bool:
        """Returns whether the next B of a stage belongs to its first run."""
        done = self.stages[p].done
        if done[B, 0] >= done[B, 1]:
            return False
        return p == self.P - 1 or (B, 0, p + 1, done[B, 0]) in self.end or done[B, 1] >= self.M

    def next_f(self, p: int) -> int | None:
        done = self.stages[p].done
        if done[F, 1] >= self.M:
            return None
        if done[F, 1] >= done[F, 0]:
            return 0
        if p == self.P - 1 or (F, 1, p + 1, done[F, 1]) in self.end:
            return 1
        if done[F, 0] < self.M and (p == 0 or (F, 0, p - 1, done[F, 0]) in self.end):
            return 0
        return None

    def ready(self, kind: int, run: int, p: int) -> float:
        """Returns the time at which the message that an op reads arrives."""
        before = p - 1 if (kind == F) == (run == 0) else p + 1
        if not 0 <= before < self.P:
            return 0.0
        return self.end.get((kind, run, before, self.stages[p].done[kind, run]), 0.0) + self.times[3]

    def fill(self, kind: int, run: int, p: int, *, fills: bool) -> None:
        """Schedules Ws before an op where they fit; adds one that does not fit if the bubble would be too long."""
        ready = self.ready(kind, run, p)
        while self.waiting[p] and ready >= self.now[p] + self.times[W] - 1e-12:
            self.put_w(p)
        most = max(*self.bubble, max(self.allowed) - self.allowed[p]) if max(self.allowed) >= 0 else max(self.bubble)
        if self.waiting[p] and fills and ready - self.now[p] > most - self.bubble[p] + 1e-12:
            self.put_w(p)

    def make_room(self, p: int, change: float) -> None:
        while self.held[p] + change > self.limit + 1e-9 and self.waiting[p]:
            self.put_w(p)
        self.is_short |= self.held[p] + change > self.limit + 1e-9

    def put_w(self, p: int) -> None:
        self.put(W, self.waiting[p].popleft(), p)

    def put(self, kind: int, run: int, p: int) -> None:
        stage = self.stages[p]
        microbatch = stage.done[kind, run]
        if microbatch >= self.M:
            return
        ready = self.ready(kind, run, p) if kind != W else 0.0
        if stage.done[F, 0]:
            self.bubble[p] += max(0.0, ready - self.now[p])
        length = len(stage.order)
        stage.run((kind, run))
        self.is_short |= len(stage.order) == length
        self.now[p] = max(self.now[p], ready) + self.times[kind]
        self.held[p] += self.change[kind]
        self.end[kind, run, p, microbatch] = self.now[p]
        if kind == B:
            self.waiting[p].append(run)


def v_min(P: int, M: int) -> list[list[Op]]:
    """V-Min (arXiv 2405.15362, section 3): every pass goes to the next stage one slot later."""
    gap = 2 if P % 3 == 0 else 0
    return squeezed([(p, 2 * P - 1 - p, 2 * P + gap + p, 4 * P + gap - 1 - p) for p in range(P)], M)


def v_half(P: int, M: int) -> list[list[Op]]:
    """V-Half (same section): the passes of the first run go on two slots later, those of the second one slot."""
    gap = 3 if P % 2 == 0 else 0
    return squeezed([(2 * p, 3 * P - 2 - p, 3 * P + gap - 1 + 2 * p, 6 * P + gap - 2 - p) for p in range(P)], M)


PASSES = ((F, 0), (F, 1), (B, 1), (B, 0))
"""Passes of a micro-batch through a stage, (kind, run), in order."""


def squeezed(blocks: Sequence[tuple[int, ...]], M: int) -> list[list[Op]]:
    """Repeats a building block every six slots, and squeezes what is before and after the steady part, twice.

    The first time Ws have slots of their own and all ops may move to an earlier free slot; the second time only those
    after the last micro-batch has begun, and Ws are what is left. No move takes more memory than the stage with the
    most has without it.
    """
    P = len(blocks)
    slots = [{(t, m): slot + 6 * m for t, slot in enumerate(block) for m in range(M)} for block in blocks]
    slots = _moved(P, M, [_with_w(of_stage) for of_stage in slots], with_w=True)
    slots = _moved(P, M, [{op: at for op, at in of_stage.items() if op[0] < 4} for of_stage in slots], with_w=False)
    orders = []
    for p, of_stage in enumerate(slots):
        passes = {op: at for op, at in of_stage.items() if op[0] < 4}
        of_run, order = Counter[int](), list[Op]()
        waiting = [0, 0]
        chunks = (p, 2 * P - 1 - p)
        for (t, m), _ in sorted(_with_w(passes).items(), key=lambda item: item[1]):
            if t < 4:
                kind, run = PASSES[t]
                order.append((kind, 0, m, chunks[run]))
                waiting[run] += kind == B
            else:
                run = 1 if waiting[1] else 0
                waiting[run] -= 1
                order.append((W, 0, of_run[run], chunks[run]))
                of_run[run] += 1
        orders.append(order)
    return orders


def _with_w(passes: Slots) -> Slots:
    """Adds Ws, pass 4, in the slots that are free after a B."""
    at = {slot: t for (t, _), slot in passes.items()}
    number, waiting, ws = 0, 0, {}
    slot, last = 0, max(at)
    while slot <= last or waiting:
        if slot in at:
            waiting += at[slot] >= 2
        elif waiting:
            ws[4, number] = slot
            number, waiting = number + 1, waiting - 1
        slot += 1
    return passes | ws


def _moved(P: int, M: int, slots: list[Slots], *, with_w: bool) -> list[Slots]:
    """Moves ops to the earliest free slot after what they wait for, stage by stage as time goes, and closes gaps."""
    most = max(map(_most_held, slots))
    used = [set() for _ in range(P)]
    phase = 0
    for _, p, (t, m) in sorted((slot, p, op) for p, of_stage in enumerate(slots) for op, slot in of_stage.items()):
        mine, now = slots[p], slots[p][t, m]
        if phase == 0 and (p, t) == (0, 3):
            phase = 1
        is_kept = phase == 1 or (phase == 0 and not with_w)
        if phase == 1 and t == 0 and m == M - 1:
            phase = 2
        if not is_kept:
            for slot in range(1 + max(_waits_for(slots, P, p, t, m)), now):
                if slot not in used[p]:
                    mine[t, m] = slot
                    if _most_held(mine) <= most:
                        break
            else:
                mine[t, m] = now
        used[p].add(mine[t, m])
    return _early(P, slots if with_w else [_with_w(of_stage) for of_stage in slots])


def _waits_for(slots: list[Slots], P: int, p: int, t: int, m: int) -> Iterator[int]:
    """Yields the slots of the ops that one waits for."""
    yield -1
    if m:
        yield slots[p][t, m - 1]
    if t == 4:
        yield sorted(slot for (u, _), slot in slots[p].items() if u in (2, 3))[m]
        return
    if t:
        yield slots[p][t - 1, m]
    other = p - 1 if t in (0, 2) else p + 1
    if 0 <= other < P:
        yield slots[other][t, m]


def _most_held(slots: Slots) -> int:
    """Most runs of micro-batches that a stage holds at once; Ws are what is left where they have no slots."""
    passes = slots if any(t == 4 for t, _ in slots) else _with_w(slots)
    held = most = 0
    for _, t in sorted((slot, t) for (t, _), slot in passes.items()):
        held += (1, 1, 0, 0, -1)[t]
        most = max(most, held)
    return most


def _early(P: int, slots: list[Slots]) -> list[Slots]:
    """Runs every stage's ops in their order as early as that allows, each taking one slot."""
    early: list[Slots] = [{} for _ in range(P)]
    free = [0] * P
    for _, p, (t, m) in sorted((slot, p, op) for p, of_stage in enumerate(slots) for op, slot in of_stage.items()):
        waits = [free[p] - 1]
        if 0 < t < 4:
            waits.append(early[p][t - 1, m])
        other = p - 1 if t in (0, 2) else p + 1
        if t < 4 and 0 <= other < P:
            waits.append(early[other][t, m])
        early[p][t, m] = max(waits) + 1
        free[p] = early[p][t, m] + 1
    return early


ORDERS: dict[str, Callable[[int, int], list[list[Op]] | None]] = {
    "ZB-V": zbv_in_turn,
    "DualPipeV": dualpipe_v,
    "V-Half": v_half,
    "V-Min": v_min,
}
"""Orders that depend on no times, by name; ``zbv_by_times`` depends on them."""
