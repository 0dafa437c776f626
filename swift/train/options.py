"""Options of one invocation of a run."""

from dataclasses import dataclass
from pathlib import Path

from swift.data.pipeline.elsewhere import ConnectHosts
from swift.deadlines import Deadlines
from swift.pipeline.reconfigure.engine import Prepare
from swift.runlog.observer import Observer
from swift.train.checkpoints.fork import WeightSource
from swift.train.display.progress import Series
from swift.train.hosts.agreement import ALONE, Hosts


@dataclass(frozen=True)
class TrainOptions:
    """Options of one invocation of a run, apart from what it computes.

    Attributes:
        run_dir: run directory.
        config_text: operative configuration, kept in the run directory; empty: as ``config_text`` writes it.
        resume: whether to continue the run in the directory.
        stop_at: iteration after which to stop early, with a checkpoint; None: no such iteration.
        profile: (first, last) iteration to trace with the profiler, or None.
        prepare: ``next`` plans and compiles ahead for the failure or return of any one worker.
        stopping_s: seconds from Ctrl-C or SIGTERM to the end of the process, which saves a checkpoint in that time.
        init_from: run or model whose weights a new run begins with; None: they are drawn with ``Experiment.seed``.
        log_every: iterations between two lines of progress; None: about ten lines in all, and none on a terminal.
        observers: observers of the run besides TensorBoard.
        series: place of the run among several that run one after the other; None: it is alone.
        corpora: directory of indexes of corpora, see ``find_index``; None: the corpus is read and cut again.
        connect: function that connects to input hosts while the index of the corpus is built; None: there are none.
        hosts: hosts that the run is on.
    """

    run_dir: Path
    config_text: str = ""
    resume: bool = False
    stop_at: int | None = None
    profile: tuple[int, int] | None = None
    prepare: Prepare = "next"
    stopping_s: float = Deadlines.stopping
    init_from: WeightSource | None = None
    log_every: int | None = None
    observers: tuple[Observer, ...] = ()
    series: Series | None = None
    corpora: Path | None = None
    connect: ConnectHosts | None = None
    hosts: Hosts = ALONE
