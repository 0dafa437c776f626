"""Surveys that outlive a process: what stays of a source, and its samples, in files named by a digest."""

from swift.data.pipeline.keeping.digests import NoDigest, pipeline_facts, survey_digest
from swift.data.pipeline.keeping.store import check_writable, find_survey

__all__ = ["NoDigest", "check_writable", "find_survey", "pipeline_facts", "survey_digest"]
