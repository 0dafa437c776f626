"""Plans: schedules of normalized failures, on disk and as JSON."""
