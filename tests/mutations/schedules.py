"""Mistakes in schedules and in their lowering to ticks."""

from tests.mutations.mutation import Mutation

SCHEDULES = ("tests/schedules/test_verify.py", "tests/schedules/test_schedule.py", "tests/schedules/test_bounds.py")
LOWERING = ("tests/schedules/test_lower.py",)

MUTATIONS = (
    Mutation(
        "schedules/rules.py",
        "(end[order][:-1] > start[order][1:] + table.tolerance)",
        "(end[order][:-1] > start[order][1:] + 1e9)",
        SCHEDULES,
    ),
    Mutation(
        "schedules/rules.py",
        "for op in np.argwhere((count_3KDMP != 1) & exists_DM[:, :, None]):",
        "for op in np.argwhere((count_3KDMP > 1) & exists_DM[:, :, None]):",
        SCHEDULES,
    ),
    Mutation(
        "schedules/lowering/ticks.py",
        "back = Kind.B if schedule.problem.decoupled else Kind.W",
        "back = Kind.B",
        LOWERING,
    ),
    Mutation(
        "schedules/lowering/ticks.py",
        "np.maximum.at(length_T, tick_n, _durations(schedule))",
        "np.minimum.at(length_T, tick_n, _durations(schedule))",
        LOWERING,
    ),
    Mutation("schedules/lowering/lower.py", "np.append(0, last_ticks + 1)", "np.append(0, last_ticks)", LOWERING),
)
