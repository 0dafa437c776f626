"""Reconfiguration from one failure set to the next.

``configuration`` pairs the plan of a failure set with the workers that fill its roles; ``recut`` finds other cuts for
the survivors. ``compiled_steps`` compiles the programs of a configuration, and ``executables`` caches them in files.
``transfer`` moves a state to other workers, and ``reshard`` converts it to other numbers of ranks and stages.
``engine`` performs a change within one process; ``memory_account`` adds up the memory of a run.
"""
