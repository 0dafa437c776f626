"""What outlives a pass over the source: surveys and samples in files, named by a digest of all that decides them."""

from swift.data.pipeline.keeping.store import find_survey, read_survey

__all__ = ["find_survey", "read_survey"]
