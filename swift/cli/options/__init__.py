"""Options of the command line, read and checked."""
