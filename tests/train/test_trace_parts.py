"""Parts of a step in a trace: of a program that is traced here, and of files that are not as they should be."""

import gzip
import json
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from swift.pipeline import scopes
from swift.runlog.reading import read_run
from swift.train.trace_parts import instruction_parts, part_lines, part_seconds, trace_line
from tests.train.partial_runs import saving_one_expert
from tests.train.runs import run

TEXT = """HloModule jit_body, is_scheduled=true

%cond (p: s32[]) -> pred[] {
  ROOT %less.1 = pred[] compare(%p, %p), metadata={op_name="jit(body)/F/while/cond/lt"}
}

ENTRY %main {
  %dot.2 = f32[2,2]{1,0} dot(%a, %b), metadata={op_name="jit(body)/shard_map/F/blocks/while/body/dot_general"}
  %add_fusion.3 = f32[2]{0} fusion(%dot.2), kind=kLoop, metadata={op_name="jit(body)/shard_map/F/blocks/add"}
  %all-to-all.4 = (f32[1]{0}, f32[1]{0}) all-to-all(%x), metadata={op_name="jit(body)/U/collect/expert/all_to_all"}
  %while.5 = s32[] while(%t), condition=%cond, body=%body, metadata={op_name="jit(body)/F/while"}
  %copy.6 = f32[2]{0} copy(%y)
  ROOT %psum.7 = f32[] all-reduce-start(%z), metadata={op_name="jit(body)/W/gradients/round_0/psum"}
}
"""
PARTS = {
    "less.1": "forward",
    "dot.2": "forward/blocks",
    "add_fusion.3": "forward/blocks",
    "all-to-all.4": "update/collect/expert: all-to-all",
    "while.5": None,
    "copy.6": "outside of named parts",
    "psum.7": "weight gradient/gradients: all-reduce",
}


def event(op, dur, device=0, module="jit_body"):
    facts = {"hlo_op": op, "hlo_module": module, "device_ordinal": str(device)}
    return {"ph": "X", "pid": 1, "tid": 1, "ts": 0.0, "dur": dur, "name": op, "args": facts}


def write(path, events):
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events}, file)
    return path


def test_instructions_have_the_scopes_of_the_code():
    assert instruction_parts(TEXT) == PARTS


def test_times_are_added_up_over_devices_and_a_loop_is_not_counted_twice(tmp_path):
    events = [event("dot.2", 10.0, device) for device in (0, 1)] + [event("while.5", 99.0), event("dot.2", 5.0)]
    events += [event("mul", 7.0, module="jit_other"), {"ph": "M", "name": "process_name", "args": {"name": "x"}}]
    events += [{"ph": "X", "pid": 1, "tid": 2, "ts": 0.0, "dur": 50.0, "name": "python"}]
    seconds, num_devices = part_seconds(write(tmp_path / "vm.trace.json.gz", events), [TEXT])
    assert num_devices == 2
    assert seconds == {"forward/blocks": pytest.approx(25e-6), "other programs": pytest.approx(7e-6)}


def test_lines_have_the_mean_time_of_an_iteration(tmp_path):
    file = write(tmp_path / "plugins" / "vm.trace.json.gz", [event("dot.2", 6000.0), event("copy.6", 2000.0)])
    lines = [*part_lines(tmp_path, (3, 4), lambda: [TEXT])]
    assert trace_line(tmp_path, (3, 4)).startswith(
        f"profiler trace of iterations 3-4: {file} opens at https://ui.perfetto.dev; "
    )
    assert [line.split(maxsplit=4) for line in lines[1:]] == [
        ["75.0", "%", "3.00", "ms", "forward/blocks"],
        ["25.0", "%", "1.00", "ms", "outside of named parts"],
    ]


DAMAGED = gzip.compress(b"x")[:10] + b"\xff" * 20
"""No stream of zlib."""


@pytest.mark.parametrize(
    "content", [b"", b"no gzip", gzip.compress(b"no json"), gzip.compress(b'{"traceEvents": [1]}'), DAMAGED]
)
def test_a_trace_that_cannot_be_read_costs_the_table_only(tmp_path, content):
    (tmp_path / "vm.trace.json.gz").write_bytes(content)
    assert [*part_lines(tmp_path, (3, 4), lambda: [TEXT])] == []
    assert str(tmp_path / "vm.trace.json.gz") in trace_line(tmp_path, (3, 4))


@pytest.mark.parametrize("error", [MemoryError, RuntimeError, RecursionError])
def test_a_failure_costs_the_table_only(tmp_path, error):
    write(tmp_path / "vm.trace.json.gz", [event("dot.2", 6000.0)])

    def fail():
        raise error

    assert [*part_lines(tmp_path, (3, 4), fail)] == []


def test_a_directory_without_a_trace_is_named(tmp_path):
    assert str(tmp_path) in trace_line(tmp_path, (3, 4))
    assert [*part_lines(tmp_path, (3, 4), lambda: [TEXT])] == []


def test_the_parts_of_a_program_that_runs_here(tmp_path):
    """What JAX's profiler writes: a change of its format shows here."""

    @jax.jit
    def step(x):
        with jax.named_scope(scopes.FORWARD):
            x = jax.lax.fori_loop(0, 3, lambda _, y: y @ y / 300, x)
        with jax.named_scope(f"{scopes.UPDATE}/{scopes.COLLECT}/expert"):
            return jnp.sort(x, axis=0)

    x = jnp.ones((300, 300))
    program = step.lower(x).compile()
    program(x)
    with jax.profiler.trace(tmp_path):
        jax.block_until_ready(program(x))
    lines = "\n".join(part_lines(tmp_path, (1, 1), lambda: [program.as_text()]))
    assert "ms  forward\n" in lines
    assert "ms  update/collect/expert" in lines


def test_a_run_computes_its_table_when_it_has_ended(corpus, tmp_path, monkeypatch, capfd):
    found = []

    def seconds(*_):
        found.extend(event["event"] for event in read_run(tmp_path / "run").events)
        return Counter({"forward": 1.0}), 1

    monkeypatch.setattr("swift.train.trace_parts.part_seconds", seconds)
    run(replace(saving_one_expert(corpus), num_steps=4), tmp_path / "run", profile=(2, 3))
    told = capfd.readouterr().err
    assert "profiler trace of iterations 2-3: " in told
    assert " forward" in told.partition("profiler trace of iterations 2-3: ")[2]
    assert found[-1] == "finish"
