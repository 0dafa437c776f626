"""A chart, a picture and a trace show every op of the workers that they show, where it is, and as what it is."""

import json
import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from swift.draw.picture import COLORS, picture_file
from swift.draw.text import FILL, IDLE, MARK, draw_chart, left_out, shown_workers
from swift.draw.trace import UNIT_US, trace_events, trace_json
from swift.schedules.planners.adaptive import adaptive
from swift.schedules.problem import Costs, Kind, Problem
from swift.schedules.schedule import makespan
from swift.topology import Topology

PAPER = Problem(Topology(3, 4), 6, frozenset({(1, 2)}))
LARGE = Problem(Topology(24, 64), 64, frozenset({(5, 10), (8, 10)}))
UNEQUAL = Costs(1.0, 1.3, 0.8, 0.1, 0.1)
LONG_UPDATE = Costs(1.0, 1.3, 0.8, 2.0, 0.1)


def read_chart(schedule, width):
    """The characters of every worker's whole time axis, and the columns of a unit of time."""
    plain = draw_chart(schedule, width).plain
    axes: dict[str, str] = {}
    for name, cells in re.findall(r"^(\d+:\d+) +(.*)$", plain, re.MULTILINE):
        axes[name] = axes.get(name, "") + cells
    return axes, float(re.search(r"A unit of time is (\S+) column", plain)[1])


@pytest.mark.parametrize("costs", [Costs(), UNEQUAL, LONG_UPDATE])
@pytest.mark.parametrize("width", [40, 80, 200])
def test_every_op_is_in_its_columns(costs, width):
    schedule = adaptive(replace(PAPER, costs=costs))
    axes, scale = read_chart(schedule, width)
    expected = {f"{d}:{p}": np.full(len(axes["0:0"]), IDLE) for d, p in PAPER.topology.workers}
    marks = []
    for (kind, _, pipeline, m, _), (d, p), start, end in schedule.ops():
        cells = expected[f"{d}:{p}"]
        first, after = (int(np.floor(time * scale + 0.5 + 1e-6)) for time in (start, end))
        letter = kind.name.lower() if pipeline != d else kind.name
        # Either all ops of a kind bear their number, or none does.
        has_number = kind != Kind.U and scale * (costs.t_f, costs.t_b, costs.t_w)[kind] >= 2
        label = f"{letter}{m}" if has_number else letter
        cells[first:after] = list(label.ljust(after - first, FILL)[: after - first])
        if first == after:
            marks.append((cells, after - 1))
    for cells, column in marks:
        cells[column] = MARK
    assert bool(marks) == (costs != LONG_UPDATE)
    for name, cells in expected.items():
        assert axes[name] == "".join(cells) or name == "1:2", name


def test_the_chart_as_it_is_printed():
    schedule = adaptive(Problem(Topology(2, 2), 2, frozenset({(0, 1)}), num_iterations=2))
    lines = draw_chart(schedule, 60).plain.splitlines()
    assert lines[0].split() == ["time", "0", "5", "10", "15", "20"]
    assert [line[:5] for line in lines[1:5]] == ["0:0  ", "0:1  ", "1:0  ", "1:1  "]
    assert re.fullmatch(r"0:1  xx failed x+", lines[2])
    assert lines[1].count(MARK) == 2
    assert Counter(lines[4][5:])["f"] == Counter(lines[4][5:])["F"] == 4
    assert lines[6] == " F  forward   B  input gradient   W  weight gradient   U  update  · idle"
    assert lines[7].endswith("the same of another pipeline's micro-batch, re-routed")
    assert lines[8].startswith(f" {MARK}  U of less than a column")
    assert lines[9] == " A unit of time is 2 columns."


def test_times_stand_over_their_columns():
    lines = draw_chart(adaptive(PAPER), 80).plain.splitlines()
    rulers = [line for line in lines if line.startswith("time ")]
    width, times = len(lines[1]) - 5, {}
    for panel, ruler in enumerate(rulers):
        times |= {int(tick[0]): panel * width + tick.start() - 5 for tick in re.finditer(r"\d+", ruler)}
    assert len(rulers) == 3
    assert times == {time: 2 * time for time in range(0, 81, 5)}


@pytest.mark.parametrize("width", [1, 20, 33, 80, 120, 300])
def test_no_line_of_the_axis_is_too_long(width):
    for costs in (Costs(), UNEQUAL):
        lines = draw_chart(adaptive(replace(PAPER, costs=costs)), width).plain.splitlines()
        rows = [line for line in lines if re.match(r"\d:\d|time ", line)]
        assert max(map(len, rows)) <= max(width, 21)
        panels, below = divmod(len(rows), 13)
        assert (below, "panels" in "".join(lines)) == (0, panels > 1)


def test_where_nothing_failed_nothing_is_said_of_it():
    plain = draw_chart(adaptive(replace(PAPER, failed=frozenset())), 80).plain
    assert "re-routed" not in plain
    assert "failed" not in plain
    assert not re.search(r"^\d:\d .*[fbw]", plain, re.MULTILINE)


def test_many_ops_share_a_column_in_proportion():
    schedule = adaptive(Problem(Topology(3, 4), 300, frozenset({(1, 2)})))
    axes, scale = read_chart(schedule, 80)
    assert scale < 1
    num_iterations = schedule.problem.num_iterations
    for (d, p), cells in ((tuple(map(int, name.split(":"))), cells) for name, cells in axes.items()):
        if (d, p) == (1, 2):
            continue
        time = Counter()
        for op, _, start, end in schedule.ops_of((d, p)):
            time[op.kind.name.lower() if op.pipeline != d else op.kind.name] += end - start
        counts = Counter(cells)
        assert counts.pop(MARK) == num_iterations
        assert counts.pop(IDLE, 0) + sum(counts.values()) + num_iterations == len(cells)
        for letter, columns in counts.items():
            # A mark hides a column.
            assert abs(columns - time[letter] * scale) <= 0.01 * len(cells) + num_iterations, (d, p, letter)


def test_a_large_cluster_is_clipped_and_that_is_said():
    shown = shown_workers(LARGE)
    assert len(shown) == 64
    assert {(d, 10) for d in range(24)} < set(shown)
    assert shown == sorted(shown)
    assert set(shown) - {(d, 10) for d in range(24)} == {(0, p) for p in range(41) if p != 10}
    said = left_out(LARGE, shown)
    assert said.startswith("1,472 of 1,536 workers are left out; shown are failed workers, their peers")
    assert left_out(PAPER, shown_workers(PAPER)) == ""


def test_the_chart_of_a_large_cluster():
    schedule = adaptive(Problem(Topology(5, 20), 4, frozenset({(3, 7)})))
    plain = draw_chart(schedule, 80).plain
    assert len(re.findall(r"^\d:\d+ ", plain, re.MULTILINE)) == 64
    assert re.search(r"^3:7  +xx failed", plain, re.MULTILINE)
    assert "\n...\n3:7 " in plain
    assert "36 of 100 workers are left out" in plain
    assert len(plain.splitlines()) < 80


def test_without_other_characters_it_is_the_same_chart():
    for costs in (Costs(), LONG_UPDATE):
        schedule = adaptive(replace(PAPER, costs=costs))
        plain, other = (draw_chart(schedule, 80, ascii_only=only).plain for only in (False, True))
        assert other.isascii()
        assert other == plain.replace(IDLE, ".").replace(MARK, "|").replace(FILL, "-")


def colours(schedule, letter):
    """The styles in which a letter is printed at the start of an op."""
    console = Console(force_terminal=True, color_system="truecolor", width=300, no_color=False)
    found = set()
    for line in console.render_lines(draw_chart(schedule, 300)):
        if not re.match(r"\d:\d", "".join(segment.text for segment in line)):
            continue
        found |= {str(segment.style) for segment in line if segment.text.startswith(letter)}
    return found


def test_colours_tell_kinds_iterations_and_rerouted_ops_apart():
    schedule = adaptive(PAPER)
    styles = {letter: colours(schedule, letter) for letter in "FBWfbw"}
    for letter in "FBW":
        assert len(styles[letter]) == 2, "one for even and one for odd iterations"
        assert len(styles[letter.lower()]) == 1
    assert len(set().union(*styles.values())) == 9


def test_without_colours_no_codes_are_printed():
    console = Console(force_terminal=False, color_system=None, width=80)
    with console.capture() as captured:
        console.print(draw_chart(adaptive(PAPER), 80), soft_wrap=True)
    assert "\x1b" not in captured.get()
    assert captured.get() == draw_chart(adaptive(PAPER), 80).plain + "\n"


def read_picture(schedule):
    """Counts the shapes of every named part of the SVG, and reads its text."""
    svg = picture_file(schedule).decode()
    parts = {}
    for group in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}g"):
        if re.match("ops-|failed-|iterations-", group.get("id", "")):
            parts[group.get("id")] = len(group.findall(".//{http://www.w3.org/2000/svg}path"))
    return parts, re.findall("<!-- (.*) -->", svg)


@settings(max_examples=8, deadline=None)
@given(data=st.data(), random=st.randoms(use_true_random=False))
def test_the_picture_has_a_shape_for_every_op(problems, random_schedule, data, random):
    schedule = random_schedule(data.draw(problems()), random)
    expected = Counter(
        f"ops-{op.kind.name}" + "-rerouted" * (op.pipeline != worker[0]) for op, worker, _, _ in schedule.ops()
    )
    parts, _ = read_picture(schedule)
    drawn = Counter({name: number for name, number in parts.items() if name.startswith("ops-")})
    assert drawn == expected
    for d, p in schedule.problem.topology.workers:
        if (d, p) in schedule.problem.failed:
            assert f"failed-{d}:{p}" in parts
        else:
            assert parts[f"iterations-{d}:{p}"] == schedule.problem.num_iterations


def test_the_picture_says_what_it_shows():
    ops = list(adaptive(PAPER).ops())
    parts, texts = read_picture(adaptive(PAPER))
    assert [name for name in parts if name.startswith("failed")] == ["failed-1:2"]
    for text in (
        "time (in the unit of the costs)",
        "worker (pipeline:stage)",
        "adaptive: 3 pipelines x 4 stages, 6 micro-batches per pipeline, 1:2 failed",
        "period 27 (bound 27)",
        *("F forward", "B input gradient", "W weight gradient", "U update", "re-routed micro-batch"),
        *(f"{d}:{p}" for d, p in PAPER.topology.workers),
    ):
        assert text in texts, text
    assert any(text.startswith("underline: ") for text in texts)
    # The number of each micro-batch in each of its ops; text with an outline has no comment that says what it is.
    assert texts.count("5") == sum(op.microbatch == 5 and op.pipeline == worker[0] for op, worker, _, _ in ops)


def test_the_picture_does_not_change_from_one_time_to_the_next():
    assert picture_file(adaptive(PAPER)) == picture_file(adaptive(PAPER))
    assert picture_file(adaptive(PAPER), "png").startswith(b"\x89PNG")


def test_kinds_differ_in_greyscale():
    grey = [
        np.dot([0.299, 0.587, 0.114], [int(COLORS[kind][i : i + 2], 16) / 255 for i in (1, 3, 5)])
        for kind in (Kind.F, Kind.B, Kind.W)
    ]
    assert all(light - dark > 0.2 for light, dark in pairwise(grey))


@settings(max_examples=20, deadline=None)
@given(data=st.data(), random=st.randoms(use_true_random=False))
def test_the_trace_has_every_op_and_an_arrow_for_every_message(problems, random_schedule, data, random):
    schedule = random_schedule(data.draw(problems()), random)
    problem = schedule.problem
    events = json.loads("".join(trace_json(schedule)))["traceEvents"]
    assert events == list(trace_events(schedule))
    ops = {}
    for event in events:
        if event["ph"] == "X" and event["cat"] != "failed":
            args = event["args"]
            kind = Kind[event["cat"]]
            name = (args["iteration"], args.get("pipeline", event["pid"]), args.get("microbatch", -1), args["stage"])
            assert event["tid"] == args["stage"]
            ops[kind, *name] = event
    assert len(ops) == schedule.num_ops
    for (kind, *name), (d, p), start, end in schedule.ops():
        event = ops[kind, *name]
        assert (event["pid"], event["tid"]) == (d, p)
        assert (event["ts"], event["dur"]) == (start * UNIT_US, (end - start) * UNIT_US)
        assert kind == Kind.U or event["args"]["rerouted"] == (name[1] != d)
    check_arrows(problem, ops, [event for event in events if event["ph"] in "sf"])


def check_arrows(problem, ops, arrows):
    at = {(event["pid"], event["tid"], event["ts"]): key for key, event in ops.items() if key[0] != Kind.U}
    senders = [(Kind.F, Kind.F, 1), (Kind.B if problem.decoupled else Kind.W, Kind.B, -1)]
    expected = {
        ((sent, *name, p), (read, *name, p + step))
        for sent, read, step in senders
        for p in range(problem.num_stages)
        if 0 <= p + step < problem.num_stages
        for name in np.ndindex(problem.num_iterations, problem.num_pipelines, problem.num_microbatches)
    }
    ends = {(event["id"], event["ph"]): at[event["pid"], event["tid"], event["ts"]] for event in arrows}
    assert len(ends) == len(arrows) == 2 * len(expected)
    assert {(ends[number, "s"], ends[number, "f"]) for number, _ in ends} == expected


def test_the_trace_names_its_tracks():
    events = list(trace_events(adaptive(PAPER)))
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {
        (d, p): f"worker {d}:{p}" + (" (failed)" if (d, p) == (1, 2) else "") for d, p in PAPER.topology.workers
    }
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == [
        "pipeline 0",
        "pipeline 1",
        "pipeline 2",
    ]
    (failed,) = (event for event in events if event.get("cat") == "failed")
    assert (failed["pid"], failed["tid"], failed["dur"]) == (1, 2, makespan(adaptive(PAPER)) * UNIT_US)
