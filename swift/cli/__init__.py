"""The command line: ``main`` runs a command; most commands have a module of their own name.

``options`` and ``parser`` parse the command line; ``values`` and ``node_options`` parse option values. ``processes``
runs a command that may be killed or crash in a child process. ``child_entry`` has the entry points of the processes
that ``launch`` starts on the machines described in ``nodes``.
"""
