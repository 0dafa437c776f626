"""``swift doctor``: what this machine, or several together, lack for runs."""
