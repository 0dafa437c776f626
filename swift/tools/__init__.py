"""Tools that inspect runs and plans without training: simulation, reports, compilation for pods, drawings."""
