"""Models of the Hugging Face hub in and out.

``tensor_files`` reads and writes directories of safetensors, ``importing`` makes a model directory of one, which runs
begin with and texts are generated from, and ``exporting`` writes one from a run or a model directory.
"""

from swift.train.hugging_face.exporting import export_hugging_face
from swift.train.hugging_face.importing import import_hugging_face

__all__ = ["export_hugging_face", "import_hugging_face"]
