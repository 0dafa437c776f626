"""Pipelines: samples of a source through operators, and the plan that runs them.

A pipeline says what the samples are; a plan says how they are made: in which order the operators run, what is kept, and
by how many threads and processes. The samples of a pipeline are the same for every plan.
"""

from swift.data.pipeline.check import UntrueOperator
from swift.data.pipeline.elsewhere import ConnectHosts, InputHosts, answer_of, refused
from swift.data.pipeline.encoding import decoded
from swift.data.pipeline.keeping import NoDigest, check_writable, find_survey, pipeline_facts, survey_digest
from swift.data.pipeline.operators import DropDuplicates, Filter, Map, Pack, Sample, Shuffle, Stack, Tokenize, name_of
from swift.data.pipeline.optimizer import (
    HostsProfile,
    InputProfile,
    Resources,
    alternatives,
    plan_input,
    profile_hosts,
    profile_input,
)
from swift.data.pipeline.pipeline import NotedPipeline, Pipeline
from swift.data.pipeline.plan import CachePoint, InputPlan, plain_plan
from swift.data.pipeline.run import in_order
from swift.data.pipeline.samples import Samples
from swift.data.pipeline.survey import survey

__all__ = [
    "CachePoint",
    "ConnectHosts",
    "DropDuplicates",
    "Filter",
    "HostsProfile",
    "InputHosts",
    "InputPlan",
    "InputProfile",
    "Map",
    "NoDigest",
    "NotedPipeline",
    "Pack",
    "Pipeline",
    "Resources",
    "Sample",
    "Samples",
    "Shuffle",
    "Stack",
    "Tokenize",
    "UntrueOperator",
    "alternatives",
    "answer_of",
    "check_writable",
    "decoded",
    "find_survey",
    "in_order",
    "name_of",
    "pipeline_facts",
    "plain_plan",
    "plan_input",
    "profile_hosts",
    "profile_input",
    "refused",
    "survey",
    "survey_digest",
]
