"""Surveys that outlive a process: what stays of a source, and its samples, in files named by a digest."""

from swift.data.pipeline.keeping.store import find_survey, read_survey

__all__ = ["find_survey", "read_survey"]
