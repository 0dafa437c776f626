"""A process beside a run has ready what the run's processes ask for after a failure, and after a return."""

import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from queue import Queue

import pytest

from swift.checkpoint.config import CheckpointConfig
from swift.config.experiment import Experiment
from swift.config.gin_reader import load_experiment
from swift.elastic.jax_group import CoordinationService
from swift.elastic.services.compile_service import CompileJob, _outcome, jobs_for
from swift.elastic.transport.messages import (
    COMPILE_ANSWERS,
    COMPILE_REQUESTS,
    Alive,
    CompileFailed,
    CompileRequest,
    CutPrepared,
    Prepared,
)
from swift.errors import RunError
from swift.mesh.live import storage_mesh
from swift.pipeline.reconfigure.compiled_steps import program_key
from swift.pipeline.reconfigure.configuration import Configurator
from swift.pipeline.reconfigure.executables import ExecutableCache
from swift.schedules.plans.normalize import ChunkAssignment, Move
from swift.topology import Topology
from swift.train.build import make_plan_settings, make_step_spec

WAIT_S = 300
NONE, FIRST = frozenset(), frozenset({(0, 0)})
TINY = """
Experiment.model = @ModelConfig()
ModelConfig.num_layers = 1
ModelConfig.model_dim = 16
ModelConfig.num_heads = 2
ModelConfig.ffn_dim = 16
ModelConfig.sequence_length = 16
ModelConfig.moe_pattern = (True,)
Experiment.experts = @ExpertConfig()
ExpertConfig.num_classes = 4
ExpertConfig.slots_per_rank = 2
Experiment.topology = @Topology()
Topology.num_pipelines = 2
Topology.num_stages = 1
Topology.num_expert_ranks = 2
Experiment.data = @DataConfig()
DataConfig.source = @TextFiles()
DataConfig.validation_share = 0.2
TextFiles.pattern = '{corpus}'
Experiment.num_microbatches = 1
Experiment.sequences_per_microbatch = 2
Experiment.num_steps = 400
Experiment.eval_every = 0
Experiment.checkpoint = @CheckpointConfig()
CheckpointConfig.every = 100
"""
MAIN = (
    "import sys; from pathlib import Path; from swift.config.gin_reader import load_experiment\n"
    "from swift.elastic.services.compile_service import run_compile_service\n"
    "run_compile_service(load_experiment(Path(sys.argv[1])), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))"
)


@pytest.fixture
def config(tmp_path):
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text("".join(chr(32 + (7 + number) * i * i % 90) for i in range(1000)))
    (tmp_path / "tiny.gin").write_text(TINY.format(corpus=tmp_path / "*.txt"))
    return tmp_path / "tiny.gin"


def start(*arguments):
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    command, pipe = [sys.executable, *map(str, arguments)], subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)


@contextmanager
def compile_service(config, programs, num_local):
    """The process, and what it says; None when it has ended."""
    sockets = tempfile.TemporaryDirectory()
    process, heard = start("-c", MAIN, config, programs, sockets.name, num_local), Queue()

    def listen():
        with process.stdout:
            for line in process.stdout:
                if not isinstance(said := COMPILE_ANSWERS.read(line), Alive):
                    heard.put(said)
        heard.put(None)

    threading.Thread(target=listen, daemon=True).start()
    try:
        yield process, heard
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        sockets.cleanup()


def wish(process, *failed):
    process.stdin.write("".join(COMPILE_REQUESTS.line(CompileRequest(one)) for one in failed))
    process.stdin.flush()


def files(programs):
    return {path.name for path in programs.glob("*") if not path.suffix}  # locks and plans have one


def test_a_failure_is_prepared_for_before_a_return():
    one = Experiment(topology=Topology(2, 2, 8), eval_every=0, checkpoint=CheckpointConfig(every=0))
    now, here, back = jobs_for(one, CompileRequest(frozenset({(1, 0)}))), ("single",), (1, 0)
    assert now == [
        CompileJob(frozenset({(1, 0)}), here),
        CompileJob(frozenset({(1, 0), (0, 1)}), here),
        CompileJob(frozenset({(1, 0), (1, 1)}), here),
        CompileJob(NONE, here, back),
    ]


def test_a_better_cut_for_the_survivors_comes_before_what_may_happen_next_and_once():
    one = Experiment(topology=Topology(2, 2, 8), eval_every=0, checkpoint=CheckpointConfig(every=0), adapt="auto")
    down, here, cut = frozenset({(1, 0)}), ("single",), ChunkAssignment(((0, 1), (1, 1)))
    more = [frozenset({(1, 0), (0, 1)}), frozenset({(1, 0), (1, 1)})]
    assert jobs_for(one, CompileRequest(down)) == [
        CompileJob(down, here),
        CompileJob(down, here, is_better=True),
        *[CompileJob(failed, here) for failed in more],
        CompileJob(NONE, here, (1, 0)),
    ]
    assert jobs_for(one, CompileRequest(down, cut=cut)) == [
        CompileJob(down, here, is_better=True),
        *[CompileJob(failed, here, before=cut) for failed in more],
        CompileJob(NONE, here, (1, 0), before=cut),
        CompileJob(down, here, before=cut),
    ]
    assert not any(job.is_better for job in jobs_for(one, CompileRequest(NONE)))
    assert jobs_for(one, CompileRequest(down, seeks_cut=False)) == [
        job for job in jobs_for(one, CompileRequest(down)) if not job.is_better
    ]


def test_what_few_iterations_need_comes_last():
    one = Experiment(topology=Topology(2, 1, 8), window=2, eval_every=10)
    near = [NONE, FIRST, frozenset({(1, 0)})]
    assert jobs_for(one, CompileRequest(NONE)) == [
        *[CompileJob(failed, ("window", "evaluate")) for failed in near],
        *[CompileJob(failed, ("single",)) for failed in near],
    ]


def test_programs_by_which_states_get_to_their_workers_are_prepared_with_those_of_a_window():
    """Also the way home with the same failures: a generation that forms anew has the run's own cuts."""
    one = Experiment(topology=Topology(2, 2, 8), window=2, eval_every=10, adapt="auto")
    down, cut = frozenset({(1, 0)}), ChunkAssignment(((0, 1), (1, 1)))
    jobs = jobs_for(one, CompileRequest(down, cut=cut))
    of_window, of_one = jobs[: len(jobs) // 2], jobs[len(jobs) // 2 :]
    assert CompileJob(down, ("window", "evaluate"), before=cut) in of_window
    assert of_one == [CompileJob(job.failed, ("single",), is_better=job.is_better) for job in of_window]
    assert [job.is_better for job in jobs].count(True) == 2


MOVED = ChunkAssignment(((0, 1), ()), (Move((1, 0), (0, 1)),))


@pytest.mark.parametrize(
    "wish",
    [
        CompileRequest(FIRST),
        CompileRequest(NONE, 3),
        CompileRequest(FIRST, None, MOVED, False),
    ],
)
def test_a_wish_is_understood(wish):
    assert COMPILE_REQUESTS.read(COMPILE_REQUESTS.line(wish)) == wish


def test_an_elastic_run_is_prepared_for_a_rank_less_and_then_for_one_more():
    one = Experiment(topology=Topology(1, 1, 4), eval_every=0, checkpoint=CheckpointConfig(every=0))
    for num_ranks, wanted in ((4, [4, 3]), (3, [3, 2, 4]), (1, [1, 2])):
        assert [job.num_ranks for job in jobs_for(one, CompileRequest(NONE, num_ranks))] == wanted


@pytest.mark.parametrize(
    "said",
    [
        Prepared(FIRST, None, ("single", "evaluate"), 2, 1.5),
        Prepared(NONE, 3, ("single",), 0, 1.5),
        Prepared(FIRST, None, ("single",), 1, 1.5, before=MOVED),
        CutPrepared(FIRST, MOVED, (3, 1), 0.25, 1e9, 2.5),
        CompileFailed("no plan"),
    ],
)
def test_what_is_said_is_understood(said):
    assert COMPILE_ANSWERS.read(COMPILE_ANSWERS.line(said)) == said


def test_what_cannot_be_prepared_is_told_and_only_an_unknown_jax_ends_it():
    class Unable:
        def __init__(self, error):
            self._error = error

        def prepare(self, _):
            raise self._error

    assert _outcome(Unable(ValueError("no plan")), CompileJob(FIRST, ())) == CompileFailed("with 0:0 down: no plan")
    with pytest.raises(RunError, match="unknown"):
        _outcome(Unable(RunError("unknown")), CompileJob(FIRST, ()))


@pytest.mark.slow
def test_programs_are_where_the_processes_look(config, tmp_path):
    config.write_text(config.read_text() + "CheckpointConfig.every = 0\n")
    programs = tmp_path / "programs"
    with compile_service(config, programs, 2) as (process, heard):
        wish(process, NONE, FIRST)  # the second replaces the first, of which nothing was begun
        said = heard.get(timeout=WAIT_S)
        assert said[:4] == (FIRST, None, ("single",), 1), said
    assert len(files(programs)) == 1
    one = load_experiment(config)
    configurator = Configurator(make_plan_settings(one, make_step_spec(one, storage_mesh(one.topology))))
    assert key_of(configurator.configure(FIRST), "single") in ExecutableCache(programs)
    assert key_of(configurator.configure(NONE), "single") not in ExecutableCache(programs)


def key_of(configuration, kind):
    return program_key(configuration, 2, kind, keep_state=True)


@pytest.mark.slow
@pytest.mark.parametrize("num_local", [2, 1])
def test_a_return_finds_all_programs_ready(config, tmp_path, sockets, num_local):
    """A process for each worker of two ranks, and one for each rank."""
    programs, kinds = tmp_path / "programs", ("single", "evaluate")
    with compile_service(config, programs, num_local) as (process, heard):
        wish(process, NONE, FIRST)  # the second replaces the first, of which nothing was begun
        said = [heard.get(timeout=WAIT_S) for _ in range(2)]
        assert [one[:4] for one in said] == [(FIRST, None, kinds, 2), (NONE, None, kinds, 3)], said
        wish(process, NONE)
        said = [heard.get(timeout=WAIT_S) for _ in range(3)]
        assert [one[0] for one in said] == [NONE, FIRST, frozenset({(1, 0)})]
        assert [one.compiled for one in said] == [0, 0, 0]  # whoever has failed, the program is the same
    ready = files(programs)
    assert len(ready) == 5
    for index, (step, loss) in enumerate(run_group(config, programs, sockets, num_local)):
        assert step == 8, index
        assert loss == pytest.approx(math.log(load_experiment(config).data.vocab_size), rel=1e-5)
    assert files(programs) == ready


def run_group(config, programs, sockets, num_local):
    """The iteration after, and the loss of each process of a real group of all workers."""
    count = 4 // num_local
    service, script = CoordinationService(count, sockets), Path(__file__).parent / "prepared_member.py"
    members = [start(script, config, programs, num_local, service.address, index, count) for index in range(count)]
    try:
        said = [member.communicate(timeout=WAIT_S)[0].splitlines()[-1].split() for member in members]
        return [(int(step), float(loss)) for step, loss in said]
    finally:
        for member in members:
            member.kill()
        service.close()


def test_it_ends_with_its_input_also_while_it_compiles(config, tmp_path):
    programs = tmp_path / "programs"
    with compile_service(config, programs, 2) as (process, heard):
        wish(process, NONE)
        deadline = time.monotonic() + WAIT_S
        while not list(programs.glob("*.lock")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.stdin.close()
        assert process.wait(timeout=10) == 0
        assert heard.get(timeout=10) is None  # nothing was ready yet
