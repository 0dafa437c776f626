"""Rows and columns of a mixed-integer linear program, solved by HiGHS.

Shape suffixes: T slots, n columns or entries.
"""

import math
from collections.abc import Sequence

import highspy
import numpy as np

ZERO, ONE = 0, 1
"""Columns with fixed values."""

Terms = list[tuple[float, Sequence[int] | np.ndarray]]
"""(factor, columns) pairs with one column for every row."""


class Refuted(Exception):
    """The program is infeasible: no such schedule exists."""


class Undecided(Exception):
    """The solver ran out of time."""


def at(columns_T: np.ndarray, slots_T: np.ndarray) -> np.ndarray:
    """Selects the columns of these slots; before slot 0 nothing has started, and the last count holds ever after."""
    return np.where(slots_T < 0, ZERO, columns_T[np.clip(slots_T, 0, len(columns_T) - 1)])


class MixedIntegerProgram:
    """A MILP with nonnegative integer columns, for which any feasible solution will do."""

    def __init__(self) -> None:
        self.uppers, self.num_columns = [np.array([0.0, 1.0])], 2
        self.lower_bounds: list[np.ndarray] = []
        self.upper_bounds: list[np.ndarray] = []
        self.num_rows = 0
        self.entries: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def add_columns(self, most: float, number: int) -> np.ndarray:
        """Adds columns with values from 0 to ``most``, and returns their indices."""
        self.uppers.append(np.full(number, float(most)))
        self.num_columns += number
        return np.arange(self.num_columns - number, self.num_columns)

    def add_count(self, most: int, first: int, last: int, total: int, end: int) -> np.ndarray:
        """Adds a count that rises from 0 before ``first`` to ``total`` from ``last`` on, as columns int[T]."""
        if last < first:
            raise Refuted
        columns_T = np.full(end + 1, ZERO)
        columns_T[first:last], columns_T[last:] = self.add_columns(most, last - first), total
        self.add([(1, columns_T[first:last]), (-1, columns_T[first + 1 : last + 1])], -math.inf, 0)
        return columns_T

    def add(self, terms: Terms, lower: float, upper: float) -> None:
        """Adds rows lower <= sum of factor * column <= upper."""
        number = len(terms[0][1])
        rows_n = np.arange(self.num_rows, self.num_rows + number)
        self.entries += [(rows_n, np.asarray(columns_n), np.full(number, float(factor))) for factor, columns_n in terms]
        self.lower_bounds.append(np.full(number, float(lower)))
        self.upper_bounds.append(np.full(number, float(upper)))
        self.num_rows += number

    def solve(self, time_limit_s: float) -> np.ndarray:
        """Finds a value for every column.

        Raises:
            Refuted: the program is infeasible.
            Undecided: time ran out.
        """
        solver = highspy.Highs()
        solver.setOptionValue("output_flag", False)
        solver.setOptionValue("threads", 1)
        solver.setOptionValue("time_limit", max(0.0, time_limit_s))
        solver.setOptionValue("mip_max_improving_sols", 1)
        solver.passModel(self.as_lp())
        solver.run()
        if solver.getInfo().primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible:
            return np.array(solver.getSolution().col_value)
        # All columns are bounded, so an unbounded program cannot occur.
        refuted = highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible
        raise Refuted if solver.getModelStatus() in refuted else Undecided

    def as_lp(self) -> highspy.HighsLp:
        """Builds the program in HiGHS's format."""
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = self.num_columns, self.num_rows
        # Any solution will do, but an objective that favours early starts finds one far sooner than none.
        lp.col_cost_ = np.full(self.num_columns, -1.0)
        lp.col_upper_ = np.concatenate(self.uppers)
        lp.col_lower_ = np.where(np.arange(self.num_columns) == ONE, 1.0, 0.0)
        lp.row_lower_, lp.row_upper_ = np.concatenate(self.lower_bounds), np.concatenate(self.upper_bounds)
        lp.integrality_ = [highspy.HighsVarType.kInteger] * self.num_columns
        rows_n, columns_n, values_n = (np.concatenate(parts) for parts in zip(*self.entries, strict=True))
        # Where a row contains a column twice, for example at its end, the factors are added.
        keys_n, inverse_n = np.unique(rows_n * self.num_columns + columns_n, return_inverse=True)
        factors_n = np.bincount(inverse_n, values_n)
        rows_n, columns_n = np.divmod(keys_n, self.num_columns)
        kept = (np.abs(factors_n) > 1e-12) & (columns_n != ZERO)
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.concatenate([[0], np.cumsum(np.bincount(rows_n[kept], minlength=self.num_rows))])
        lp.a_matrix_.index_ = columns_n[kept].astype(np.int32)
        lp.a_matrix_.value_ = factors_n[kept]
        return lp
