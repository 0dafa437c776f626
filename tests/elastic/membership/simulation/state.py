"""The state of a simulated run, and what is asked about it."""

from collections import Counter, defaultdict, deque
from dataclasses import replace

from swift.elastic.membership.state_machine import Membership
from tests.elastic.membership.script import LIMITS


class WorldState:
    """Simulated processes, what is on its way from and to them, and what has been seen of their generations."""

    # Counted over all runs: tests ask whether what is rare has happened at all.
    num_generations = num_moves = num_refusals = num_left_out = num_stalls = 0

    def __init__(self, topology, processes, policy):
        self.topology = topology
        # Where the others keep running, one that fails at its start ends the run; here it may always fail again.
        limits = LIMITS if policy.recovery == "restart" else replace(LIMITS, max_quick_deaths=1000)
        self.time, self.membership = 0.0, Membership.of(processes, limits, 0.0, policy)
        self.is_elastic, self.cut_of, self.handed_over = policy.is_elastic, {}, {}
        self.newest_saved, self.is_full, self.asked, self.starts, self.restored = 0, True, deque(), {}, {}
        self.failed_at_start, self.left_out, self.worked = Counter(), set(), {0}
        self.together, self.failing_since = [], 0.0  # who has failed since one did so at its start
        self.broken, self.is_jammed = set(), False  # who always dies in its first iteration; whether none ever ends
        self.blamed, self.chance, self.down, self.is_stopped = Counter(), None, set(), False
        self.everybody, self.newest, self.retired = [], {}, set()
        self.is_refused = False
        self.loaded, self.ahead = defaultdict(set), {}  # by generation that runs meanwhile: by whom, and which cut
        self.forms, self.goes, self.answers, self.begun, self.state_of, self.have_left = {}, {}, {}, {}, {}, {}

    def by_member(self, member):
        return next(one for one in self.everybody if one.member == member)

    def written(self):
        """The last iteration that anybody has finished, which is also the last that is recorded."""
        return max((one.done for one in self.everybody), default=0)

    def processes_in(self, number):
        return tuple(member.process for member in self.forms[number].members)

    def spent(self):
        """Those that must not be started again."""
        limit = self.membership.policy.max_restarts
        return {process for process, count in self.blamed.items() if count > limit} | self.left_out

    def hopeless(self):
        """Those that are never there again."""
        return self.retired | {process for process in self.spent() if self.newest[process].is_dead}

    def are_enough(self, processes, cut=()):
        """Whether they are all processes of some worker of every stage, or block; in an elastic run, any process."""
        if self.is_elastic:
            return bool(processes)
        workers = {process.worker for process in self.newest} - {one.worker for one in set(self.newest) - processes}
        if cut:
            places = {dict(cut.moves).get(worker, worker) for worker in workers}
            held = {(b, d, p) for d, stages in enumerate(cut.stage_of_chunk) for b, p in enumerate(stages)}
            there = {b for b, *place in held if tuple(place) in places}
            return there == {b for b, *_ in held}
        return {stage for _, stage in workers} == {process.worker[1] for process in self.newest}

    def able(self):
        """Processes that can be members; none, where a stage has only retired ones."""
        gone = self.hopeless()
        there = set(self.newest) - gone
        if self.membership.policy.needs_all and gone:
            return set()
        maimed = set() if self.is_elastic else {process.worker for process in gone}
        able = {process for process in there if process.worker not in maimed}
        return (
            able if {process.worker[1] for process in able} == {process.worker[1] for process in self.newest} else set()
        )

    def is_well(self):
        """Whether all that can be are members of a live generation and run it, and no other is left."""
        able, generation = self.able(), self.membership.generation
        if not able:
            return generation is None
        members = [self.newest[process] for process in able]
        return (
            generation is not None
            and generation.is_live
            and {process for process, _ in generation.form.members} == able
            and all(one.runs and one.can_act and one.number == generation.form.number for one in members)
            and not any(one.is_up for one in self.everybody if one is not self.newest[one.member.process])
        )
