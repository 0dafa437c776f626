"""A campaign against a stand-in: it continues where promises are kept, and sees each that is broken."""

import shutil
from pathlib import Path

import pytest
from faults.campaign import KINDS, Campaign
from faults.place import Place
from faults.record import Record
from faults.shapes import write_corpus

STAND_IN = Path(__file__).parent / "stand_in"
BROKEN = {
    "a wrong loss": (
        "1 / self.step +",
        "1 / self.step + 1e-7 * (self.generation > 1) +",
        "kill-member",
        "losses are wrong",
    ),
    "a lost record": (
        "self.metrics.w",
        "self.generation and self.step % 50 < 2 or self.metrics.w",
        "rival",
        "not record",
    ),
    "nobody comes back": ("            self.start(name)\n", "", "kill-member", "hangs"),
    "an older checkpoint": ("found[-1]", "found[0]", "kill-first", "was promised"),
    "an older expert": ("{str(self.step)", "{str(self.step - 20)", "kill-first", "updates were lost"),
    "what is left": ("            shutil.rmtree(self.scratch)", "            pass", "interrupt", "left behind"),
    "another exit code": ("return 130", "return 1", "interrupt", "exit code 1, and not"),
    "the last iteration": ("if self.told:\n                    self.save()", "if self.told:", "terminate", "not kept"),
    "a traceback": ("return 130", "raise KeyError", "interrupt", "a traceback on the terminal"),
    "two at once": ("fcntl.LOCK_EX", "fcntl.LOCK_SH", "rival", "a second run"),
    "a directory": ("self.scratch.mkdir(parents=True, exist_ok=True)", "pass", "remove-tmp", "not made again"),
    "nobody says why": ('print(f"swift: {reason}"', 'print(f"{reason}"', "rival", "was not told why"),
}


def verdicts(tmp_path, root, kinds, count):
    """The record of a short campaign."""
    place = Place(tmp_path, write_corpus(tmp_path / "corpus"), tmp_path / "cache", patience_s=6.0, root=root)
    told = []
    record = Record(tmp_path / "faults.jsonl")
    campaign = Campaign(place, kinds, ["square"], record, "1", told.append, lambda: campaign.struck >= count)
    campaign.episode(3)
    return list(record.lines()), told


@pytest.mark.slow
def test_a_run_that_keeps_its_promises_is_right(tmp_path):
    kinds = ("kill-member", "freeze-member", "kill-first", "interrupt", "remove-tmp")
    lines, told = verdicts(tmp_path, STAND_IN, kinds, 7)
    assert len(lines) >= 7, told
    assert [line["complaints"] for line in lines] == [[]] * len(lines)
    assert set(kinds) <= {line["kind"] for line in lines}
    assert not (tmp_path / "episode-3").exists()
    print("\n".join(told))


@pytest.mark.slow
@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_promise_is_seen(tmp_path, what):
    good, bad, kind, complaint = BROKEN[what]
    root = tmp_path / "root"
    shutil.copytree(STAND_IN, root)
    program = root / "swift" / "__main__.py"
    text = program.read_text()
    assert good in text
    program.write_text(text.replace(good, bad))
    lines, told = verdicts(tmp_path, root, [kind], 3)
    assert any(complaint in one for line in lines for one in line["complaints"]), told
    assert list(tmp_path.glob("wrong-episode-3-*"))


def test_all_kinds_are_known_by_their_names():
    assert all(name == kind.name for name, kind in KINDS.items())
