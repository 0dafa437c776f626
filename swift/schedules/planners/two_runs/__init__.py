"""Planner of two runs of blocks a worker, in a V: ``v`` searches, ``due_times`` schedules each of its candidates."""
