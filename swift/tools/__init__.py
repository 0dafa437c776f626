"""Tools that look at runs and plans and train nothing: simulation, reports, compilation for pods, drawings."""
