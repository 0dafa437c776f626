"""Tools that look at runs and plans and train nothing."""
