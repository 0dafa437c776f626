"""From one set of failures to the next: plans, programs and state."""
