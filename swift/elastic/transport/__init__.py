"""Processes and nodes of a run, and the messages between them.

``children`` starts and ends processes on this node, ``nodes`` those of a run on several nodes as its first node sees
them, and ``remote_node`` serves the first node from another. ``connections`` has how nodes find and authenticate each
other, and ``messages`` what workers, services and nodes say, with one codec.
"""
