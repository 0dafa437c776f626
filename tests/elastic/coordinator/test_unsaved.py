"""A run of processes has succeeded when its newest state is saved, and not before."""

from types import SimpleNamespace

import pytest

from swift.cli.launch import _run
from swift.errors import RunError

KEPT = "the state after iteration 9 is kept in /tmp/there"


def supervisor(kept, error=None):
    def run(_):
        if error is not None:
            raise error

    return SimpleNamespace(run=run, keep_unsaved=lambda: kept)


def run(kept, error=None, newest=6):
    _run(supervisor(kept, error), SimpleNamespace(newest=newest), SimpleNamespace(requested=False))


def test_a_run_whose_last_checkpoint_is_there_has_succeeded():
    run(kept=None)


@pytest.mark.parametrize(
    ("newest", "other"), [(6, "the checkpoint of iteration 6 is there"), (None, "no other checkpoint is there")]
)
def test_a_run_whose_last_checkpoint_is_not_there_has_not(newest, other):
    with pytest.raises(RunError) as caught:
        run(KEPT, newest=newest)
    assert str(caught.value) == f"the last checkpoint was not saved: stopped; {KEPT}; {other}"


@pytest.mark.parametrize(("kept", "more"), [(None, ""), (KEPT, f"; {KEPT}")])
def test_what_ends_a_run_is_told_with_where_its_unsaved_state_is(kept, more):
    with pytest.raises(RunError) as caught:
        run(kept, RunError("process 0:0 died: stopped"))
    assert str(caught.value) == f"process 0:0 died: stopped{more}"


def test_a_record_that_cannot_be_written_ends_a_run_in_one_line():
    error = OSError(28, "No space left on device")
    with pytest.raises(RunError) as caught:
        run(KEPT, error)
    assert str(caught.value) == f"[Errno 28] No space left on device: stopped; --resume continues from 6; {KEPT}"
