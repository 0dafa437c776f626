"""Live meshes, which run code written for one rank on all ranks, and transfers of state between meshes.

``live`` lays out the live workers on the devices of one or more hosts; ``devices`` emulates devices and lists chips.
``per_rank`` runs one rank's code on all ranks, with collectives ordered by ``collective_order``. ``peer_sum`` sums over
the peers of a stage, and ``state_rows`` moves state between meshes and between processes. ``hlo_collectives`` parses
the collectives of a compiled program, and ``process_group`` finds the addresses at which processes on several machines
connect.
"""
