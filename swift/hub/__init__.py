"""Models of the Hugging Face hub: their configurations and the names of their tensors, and ours for the same.

``architectures`` lists the architectures, ``architectures`` reads and writes ``config.json``, and ``tensors`` says
which tensor of a checkpoint is which part of which of our parameters. Nothing here reads files.
"""
