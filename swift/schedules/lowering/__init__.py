"""Lowering: from a schedule to the tick table that one SPMD program interprets."""
