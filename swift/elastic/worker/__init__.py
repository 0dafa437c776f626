"""A worker process of a run.

Its channel to the supervisor, the generations that it joins, and its run of each: the iterations are those of
``swift.train.TrainLoop``.
"""

from swift.elastic.worker.generation_run import NUM_SNAPSHOTS
from swift.elastic.worker.process_setup import LineWriter, settle_jax
from swift.elastic.worker.worker import WorkerProcess
from swift.elastic.worker.worker_spec import WorkerSpec

__all__ = ["NUM_SNAPSHOTS", "LineWriter", "WorkerProcess", "WorkerSpec", "settle_jax"]
