"""A profile: of how many records it is, and what it makes of them."""

import pytest

from swift.data.pipeline import Pipeline
from swift.data.records import Rows
from swift.input.profile import profile_input


def pipeline(num_records: int, calls: list) -> Pipeline:
    def noted(sample):
        calls.append(sample["number"])
        return sample

    return Pipeline(Rows([{"number": number} for number in range(num_records)])).map(noted, name="noted")


@pytest.mark.parametrize(
    ("num_records", "asked", "num_profiled"),
    [(5, None, 5), (100, None, 16), (2000, None, 40), (100_000, None, 100), (100, 60, 60), (100, 7, 7), (5, 60, 5)],
)
def test_a_short_source_is_profiled_by_few_records_unless_more_are_asked_for(num_records, asked, num_profiled):
    calls = []
    found = profile_input(pipeline(num_records, calls), asked)
    assert (found.num_profiled, found.num_records) == (num_profiled, num_records)
    # The first is made once more before, untimed; what follows tries threads, on the same records.
    assert calls[: num_profiled + 1] == [0, *range(num_profiled)]
    assert max(calls) == num_profiled - 1


def test_an_operator_that_raises_on_the_first_record_may_be_skipped_there():
    def refuses_one(sample):
        return {"inverse": 1 / sample["number"]}

    refusing = Pipeline(Rows([{"number": number} for number in range(20)]), most_skipped=1)
    found = profile_input(refusing.map(refuses_one, reads=("number",), writes=("inverse",)))
    assert found.num_profiled == 16
    assert found.operators[0].kept_share == pytest.approx(1, abs=0.1)
