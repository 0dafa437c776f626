"""A run on several hosts: how this process joins the others, what all agree on, and what one of them does alone.

JAX's coordination service connects the processes, one on each host; host 0 starts it, and writes the record.
"""
