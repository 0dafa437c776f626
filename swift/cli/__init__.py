"""The command line: ``main`` runs a command; most commands have a module of their own name.

``options`` and ``parser`` parse the command line; ``values`` and ``node_options`` parse values of options.
``processes`` runs a command in a child process if that may be killed or crash. ``child_entry`` has the entry points of
the processes that ``launch`` starts, on the machines of ``nodes``.
"""
