"""What a run's record comes to."""
