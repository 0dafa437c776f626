"""The membership of a run of processes: its protocol and the state machine that decides."""
