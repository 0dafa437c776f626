"""Names of the parts of a step, as instructions carry them in a compiled program's text and in a profiler's trace.

In a program whose schedule is data, only these names show how often an instruction runs (see
``swift.pod_compile.costs``).
"""

FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = "F", "B", "W"
"""The ops of a tick."""
BLOCKS = "blocks"
"""The loop over a stage's blocks in an op."""
ACTIVATIONS, GRADIENTS = "activations", "gradients"
"""The messages of a tick, followed by the name of a round."""
ROUND = "round_"
MICROBATCH = "microbatch"
"""Forward and whole backward of a micro-batch, on a single worker."""
EMBEDDING = "embedding_in_shares"
"""The look-up of a sharded embedding, within F, or its gradient, within B; or both within a micro-batch."""
COPIES = "hot_rows"
"""Fetching copies of rows that an iteration needs several times, and sending their gradients."""
HEAD = "head_in_shares"
"""The loss with a sharded head, within F or a micro-batch."""
UPDATE = "U"
COLLECT, PEERS, MATERIALIZE = "collect", "peers", "materialize"
"""The parts of an update, each followed by the name of a group of parameters: slot gradients to gradients of master
weights, their sum over peers, and filling the slots."""
