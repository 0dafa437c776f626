"""A worker process of a run.

``control_channel`` connects it to the supervisor, ``worker`` takes it from one generation to the next, with
``kept_states``, and ``generation_run`` runs the iterations of each, which are those of ``swift.train.TrainLoop``.
"""

from swift.elastic.worker.control_channel import wait_to_begin
from swift.elastic.worker.generation_run import NUM_SNAPSHOTS
from swift.elastic.worker.process_setup import LineWriter, configure_jax
from swift.elastic.worker.worker import WorkerProcess
from swift.elastic.worker.worker_spec import WorkerSpec

__all__ = ["NUM_SNAPSHOTS", "LineWriter", "WorkerProcess", "WorkerSpec", "configure_jax", "wait_to_begin"]
