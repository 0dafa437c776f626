"""Models of the Hugging Face hub in and out.

``tensor_files`` reads and writes directories of safetensors, ``importing`` makes a model directory of one, which runs
begin with and texts are generated from, and ``exporting`` writes one from a run or a model directory.
"""
