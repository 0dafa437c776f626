"""Live meshes: run code written for one rank on all ranks, and move state between meshes.

``live`` lays the live workers on ``devices``, of one host or several, and ``per_rank`` runs code of one rank on all,
with collectives in ``collective_order``. ``peer_sum`` sums over the peers of a stage, and ``state_rows`` moves state
between meshes and between processes. ``hlo_collectives`` reads what a compiled program exchanges, and
``process_group`` says at which addresses processes of several machines meet.
"""
