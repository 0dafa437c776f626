"""Name scopes for the parts of a step, as they appear in a compiled program's text and in a profiler's trace.

In a program that takes its schedule as an argument, only these names show how often an instruction runs (see
``swift.pod_compile.costs``).
"""

FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = "F", "B", "W"
"""Ops of a tick."""
BLOCKS = "blocks"
"""Loop over a stage's blocks in an op."""
ACTIVATIONS, GRADIENTS = "activations", "gradients"
"""Messages in a tick; the name of a round follows."""
ROUND = "round_"
MICROBATCH = "microbatch"
"""Forward and whole backward of a micro-batch, on a single worker."""
EMBEDDING = "embedding_in_shares"
"""Lookup in a sharded embedding (within F) and its gradient (within B); on a single worker, both within a
micro-batch."""
COPIES = "hot_rows"
"""Fetching copies of rows that an iteration needs several times, and sending their gradients."""
HEAD = "head_in_shares"
"""Loss with a sharded head, within F or a micro-batch."""
UPDATE = "U"
COLLECT, PEERS, MATERIALIZE = "collect", "peers", "materialize"
"""Parts of an update: reducing slot gradients to gradients of master weights, summing these over peers, and filling
the slots. A parameter group's name follows each."""
