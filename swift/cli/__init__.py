"""The command line: ``main`` runs a command, whose function is in a file of the command's name.

``options`` and ``parser`` parse a command, ``values`` and ``node_options`` read its words; ``processes`` watches over
commands that may end their process, and ``child_entry`` has the processes of ``launch``, on the machines of ``nodes``.
"""
