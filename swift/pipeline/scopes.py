"""The parts of a step, as names that its instructions bear: in a compiled program's text and in a profiler's trace.

In a program whose schedule is data nothing else tells how often an instruction runs (see
``swift.tools.pod_compile.repetitions``).
"""

FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = "F", "B", "W"
"""The ops of a tick."""
ACTIVATIONS, GRADIENTS = "activations", "gradients"
"""The messages of a tick. The name of a round of them follows."""
ROUND = "round_"
MICROBATCH = "microbatch"
"""Forward and backward of a micro-batch that are not taken apart, of a lone worker."""
UPDATE = "U"
COLLECT, PEERS, MATERIALIZE = "collect", "peers", "materialize"
"""Of an update: gradients of slots to those of master weights, their sum over peers, and new slots. The name of a group
of parameters follows."""
