"""The settings of a run.

The experiment, its list of failures, and the configuration that is stored beside a run.
"""

from swift.train.settings.config_text import config_text, defaults_in, own_kinds
from swift.train.settings.cutting import cuts_text, layers_of_stages
from swift.train.settings.experiment import Experiment
from swift.train.settings.failure_list import (
    FAILURES_SETTING,
    FailureList,
    FailureSource,
    StageRank,
    parse_event,
    parse_rank,
)
from swift.train.settings.fewer_ranks import on_ranks
from swift.train.settings.for_storage import for_storage
from swift.train.settings.stored_config import (
    GIN_NAME,
    OF_RUN,
    StoredObject,
    UnreadableConfig,
    copy_config,
    made,
    parts,
    read_config,
    write_config,
)

__all__ = [
    "FAILURES_SETTING",
    "GIN_NAME",
    "OF_RUN",
    "Experiment",
    "FailureList",
    "FailureSource",
    "StageRank",
    "StoredObject",
    "UnreadableConfig",
    "config_text",
    "copy_config",
    "cuts_text",
    "defaults_in",
    "for_storage",
    "layers_of_stages",
    "made",
    "on_ranks",
    "own_kinds",
    "parse_event",
    "parse_rank",
    "parts",
    "read_config",
    "write_config",
]
