"""Events of a run of processes: recorded in its journal, timed as recoveries and goodput, and shown to people."""

from swift.elastic.events.background_calls import BackgroundCalls
from swift.elastic.events.display import Display, goodput_table
from swift.elastic.events.journal import Journal
from swift.elastic.events.message_texts import cut_text
from swift.elastic.events.reporter import Reporter

__all__ = [
    "BackgroundCalls",
    "Display",
    "Journal",
    "Reporter",
    "cut_text",
    "goodput_table",
]
