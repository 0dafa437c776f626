"""Models of the Hugging Face hub: their configurations and the names of their tensors, and ours for the same.

``families`` lists the architectures, ``configuration`` reads and writes ``config.json``, and ``tensors`` says which
tensor of a checkpoint is which part of which of our parameters. Nothing here reads files.
"""

from swift.models.hugging_face.configuration import Decoder, read_decoder, write_decoder
from swift.models.hugging_face.families import FAMILIES, Family
from swift.models.hugging_face.tensors import EMBEDDING, HEAD, Index, TensorLocation, parts_of_tensor, tensor_locations

__all__ = [
    "EMBEDDING",
    "FAMILIES",
    "HEAD",
    "Decoder",
    "Family",
    "Index",
    "TensorLocation",
    "parts_of_tensor",
    "read_decoder",
    "tensor_locations",
    "write_decoder",
]
