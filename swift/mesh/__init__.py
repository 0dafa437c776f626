"""Live meshes: run code written for one rank on all ranks, and move state between meshes.

``live`` lays the live workers on devices, ``live`` those of several hosts, and ``per_rank`` runs code of one rank
on all; ``peer_sum`` sums over the peers of a stage; ``state_rows`` and ``state_rows`` move state between
meshes and between processes, and ``process_group`` says at which addresses processes of several machines meet.
"""
