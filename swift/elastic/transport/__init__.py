"""Starts the processes of a run on its nodes, and carries messages between them.

``children`` starts and terminates processes on one node. In a run on several nodes, ``nodes`` does this for the first
node, and ``remote_node`` is the other end of the connection. ``connections`` finds and authenticates nodes, and
``messages`` defines the messages between workers, services and nodes.
"""
