"""Checkpoints that several hosts write together, in the format of one.

``host_save`` is a save from the side of one host, ``shared_files`` what it writes and reads back, and ``host_board``
what the hosts tell each other meanwhile.
"""
