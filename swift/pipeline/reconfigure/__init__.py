"""Reconfiguration from one failure set to the next.

``configuration`` is the plan of a failure set and who fills its roles, ``recut`` finds other cuts for the survivors.
``compiled_steps`` are the programs of a configuration, ``executables`` the cache of them in files. ``transfer`` moves a
state to other workers, ``reshard`` to other ranks. ``engine`` goes through a change in one process; ``memory_account``
accounts for the memory of a run.
"""
