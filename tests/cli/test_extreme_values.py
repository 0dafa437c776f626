"""Numbers of any size, files of any bytes and names of any letters cost one line, and no traceback."""

import re
import typing
from dataclasses import fields

import numpy as np
import pytest

from swift.checkpoint.config import CheckpointConfig
from swift.config.checks import check
from swift.config.experiment import Experiment
from swift.config.gin_reader import CONFIGURABLES
from swift.data.config import DataConfig
from swift.errors import MOST_NUMBER, SettingError
from swift.experts.config import ExpertConfig
from swift.experts.optimizer import OptimizerConfig
from swift.models.config import ModelConfig
from swift.topology import Topology
from swift.typed import checked

PARTS = {
    "model": ModelConfig,
    "experts": ExpertConfig,
    "topology": Topology,
    "optimizer": OptimizerConfig,
    "checkpoint": CheckpointConfig,
    "data": DataConfig,
}
COUNTS = [-(10**400), -1, 0, 2**31 - 1, 2**31, 2**32, 2**63, 10**30, 10**400]
NUMBERS = [-np.inf, -1e300, -1.0, 0.0, 5e-324, 1e-300, 1e300, np.inf, np.nan]


def numeric_settings():
    for part, kind in [("", Experiment), *PARTS.items()]:
        hints = typing.get_type_hints(kind)
        for name in (field.name for field in fields(kind)):
            hint = hints[name]
            if {int, float} & {hint, *typing.get_args(hint)}:
                yield part, kind, name, float in (hint, *typing.get_args(hint))


def test_a_number_of_any_size_is_refused_in_one_line_or_one_that_programs_can_hold():
    settings = list(numeric_settings())
    refusals: list[str] = []
    assert len(settings) > 40
    for part, kind, name, is_float in settings:
        for value in COUNTS + NUMBERS:
            try:
                made = checked(kind, CONFIGURABLES)(**{name: value})
                experiment = Experiment(**{part: made}) if part else made
                check(experiment)
            except SettingError as error:
                refusals.append(str(error))
            else:
                held = getattr(getattr(experiment, part) if part else experiment, name)
                assert held == value, name
                assert abs(value) <= (MOST_NUMBER if is_float else 2**32), (name, value)
    kinds = "|".join(kind.__name__ for kind in (Experiment, *PARTS.values()))
    assert not [line for line in refusals if not re.fullmatch(rf"({kinds})\.\w+ = .{{1,640}}", line)]


GIN = {
    "brackets": (b"Experiment.num_steps = " + b"[" * 5000 + b"]" * 5000, "has more brackets in each other"),
    "braces": (b"Experiment.num_steps = " + b"{1:" * 5000 + b"}" * 5000, "has more brackets in each other"),
    "letters": (b"Experiment.adapt = '" + b"a" * 100_000 + b"'", r"\.\.\. \(100002 letters\): must be one of reroute"),
    "digits": (b"Experiment.num_steps = " + b"9" * 5000, r"\.\.\. \(5000 letters\) is not a value"),
    "UTF-16": ("Experiment.num_steps = 1".encode("utf-16"), "is not UTF-8 text"),
    "scope": (b"other/Experiment.num_steps = 5", r"other/Experiment.num_steps = 5: would change nothing: .*@other/Exp"),
    "scope of a part": (b"a/TextFiles.pattern = '*'", r"a/TextFiles.pattern = '\*': would change nothing: .*@a/TextF"),
    "scope in a block": (b"a/Experiment:\n  num_steps = 5", r"a/Experiment.num_steps = 5: would change nothing"),
    "name": (b"Experiment.num_steps\x1b[31m = 5", "line 23 is not gin"),
}


@pytest.mark.parametrize("name", GIN)
def test_a_file_of_any_bytes_costs_a_line(refusal, here, name):
    content, said = GIN[name]
    whole = (here / "tiny.gin").read_bytes()
    (here / "mine.gin").write_bytes(content if content.startswith(b"\xff") else whole + content + b"\n")
    line = refusal("config", "mine.gin")
    assert re.search(said, line), line
    assert len(line) < 700


def test_a_scope_that_is_named_and_a_byte_order_mark_are_taken(tell, here):
    text = (here / "tiny.gin").read_text().replace("@TextFiles()", "@few/TextFiles()")
    text += "few/TextFiles.pattern = 'corpus/[0-3].txt'\nFlexMoE.interval = 3\n"
    (here / "mine.gin").write_text(text, encoding="utf-8-sig", newline="\r\n")
    told = tell("config", "mine.gin")
    assert told.code == 0, told.err
    assert "corpus/[0-3].txt" in told.out


HEADERS = {
    "7 TiB": "{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,), }",
    "too many": "{'descr': '<f8', 'fortran_order': False, 'shape': (" + "9" * 40 + ",), }",
    "brackets": "[" * 9000,
    "no end": "{'descr': (",
    "no type": "{'descr': 5, 'fortran_order': False, 'shape': (1,), }",
}


@pytest.mark.parametrize("name", HEADERS)
def test_an_array_with_any_header_costs_a_line(refusal, here, name):
    header = HEADERS[name].encode() + b"\n"
    (here / "loads.npy").write_bytes(b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header)
    line = refusal("place", "loads.npy", "--ranks", "2", "--slots", "2")
    assert line == "LOADS.npy = 'loads.npy': cannot be read: is not an array in .npy format"


def test_loads_that_cannot_be_summed_are_refused(refusal, here):
    for loads in ([1e308, 1e308], [1e-300, 2e-300]):
        np.save(here / "loads.npy", np.array(loads))
        line = refusal("place", "loads.npy", "--ranks", "2", "--slots", "2")
        assert line.startswith("LOADS.npy = 'loads.npy': has float64[2], and must be at ")


def test_letters_that_move_a_terminal_are_escaped(tell):
    for words in (["report", "a\x1b[2Jb"], ["config", "a\x1b[2Jb"], ["train", "tiny.gin", "--a\x1b[2Jb"]):
        told = tell(*words)
        assert told.code == 2
        assert "\x1b" not in told.err
        assert "\\x1b[2J" in told.err


def test_a_run_whose_name_moves_a_terminal_is_shown_with_it_escaped(tell, here):
    run = here / "a\x1b[2J\tb"
    run.mkdir()
    (run / "config.gin").write_text("Experiment.num_steps = 3\n")
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    assert tell("report", str(run), "--out", "page.html").code == 0
    page = (here / "page.html").read_text()
    assert "a\\x1b[2J\\tb" in page
    assert "\x1b" not in page


def test_a_record_of_a_run_that_no_program_can_hold_is_named(refusal, here):
    run = here / "run"
    run.mkdir()
    (run / "config.gin").write_text("Experiment.num_steps = 3\n")
    for line in (b'{"step": 1, "loss": ' + b"9" * 400 + b"}\n", b'{"step":' * 99_999 + b"\n"):
        (run / "metrics.jsonl").write_bytes(line)
        assert refusal("report", "run").startswith("run/metrics.jsonl = 'line 1': is damaged")
