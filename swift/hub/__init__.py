"""Import and export of Hugging Face models.

``architectures`` defines the supported architectures, and reads and writes ``config.json``. ``tensors`` maps the
tensors of a checkpoint to Swift's parameters, and reads and writes safetensors files. ``companions`` handles the files
of the tokenizer and of the generation settings. ``importing`` and ``exporting`` convert whole directories.
"""
