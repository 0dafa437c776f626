"""Values of the command line: checked types, named numbers and workers, gin files, and errors that explain mistakes."""
