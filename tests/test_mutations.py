"""The table of mutations stays true to the code; `make mutations` holds the tests against it."""

from pathlib import Path

import pytest

from tests.mutations import MUTATIONS
from tests.mutations.trial import ROOT, main


def test_every_mutation_changes_one_place_and_names_tests_that_are_there():
    for mutation in MUTATIONS:
        text = (ROOT / "swift" / mutation.path).read_text()
        assert text.count(mutation.right) == 1, (mutation.path, mutation.right, text.count(mutation.right))
        assert mutation.wrong != mutation.right
        assert all((ROOT / test).exists() for test in mutation.tests), mutation.tests
    assert len({(mutation.path, mutation.right) for mutation in MUTATIONS}) == len(MUTATIONS) >= 30
    assert {"experts", "pipeline", "schedules", "checkpoint", "elastic"} <= {Path(m.path).parts[0] for m in MUTATIONS}


@pytest.mark.slow
def test_the_quick_tests_find_every_mutation():
    assert main(MUTATIONS) == 0
