"""Models of the Hugging Face hub: read as model directories of ours, and written from runs.

``architectures`` lists the architectures, and reads and writes ``config.json``; ``tensors`` says which tensor of a
checkpoint is which part of our parameters, and reads and writes their files; ``companions`` are the files beside them.
``importing`` and ``exporting`` convert whole directories.
"""
