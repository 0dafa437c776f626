"""The lock of a run directory: one process writes to it at a time, on whichever machine.

``lease`` judges whether an owner lives, ``lease_files`` and ``owners`` gather the evidence, and ``run_lock`` takes the
directory and renews the lease.
"""
