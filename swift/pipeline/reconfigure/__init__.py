"""Reconfiguration from one failure set to the next.

``configuration`` pairs the plan of a failure set with the workers that fill its roles; ``recut`` finds other cuts for
the survivors. ``compiled_steps`` are the programs of a configuration, ``executables`` their file cache. ``transfer``
moves a state to other workers, ``reshard`` to other ranks. ``engine`` performs a change within one process;
``memory_account`` accounts for the memory of a run.
"""
