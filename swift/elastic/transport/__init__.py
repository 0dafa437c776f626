"""Processes and nodes of a run, and the messages between them.

Child processes, on one node and on several; how nodes find, authenticate and serve each other; and the messages of
workers, of the two services and of nodes, which share one codec.
"""
