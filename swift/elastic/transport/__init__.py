"""Starts the processes of a run on its nodes, and carries messages between them.

``children`` starts and ends processes on one node. On several nodes, ``nodes`` does so for the first node, and
``remote_node`` is the other side of the connection. ``connections`` finds and authenticates nodes, and ``messages``
defines the messages between workers, services and nodes, with one codec.
"""
