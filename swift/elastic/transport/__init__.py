"""Messages between the processes of a run, and between its nodes."""
