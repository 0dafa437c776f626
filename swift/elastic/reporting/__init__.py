"""Reports of a run of several processes: the journal of its events, the timing of recoveries, goodput, the display."""

from swift.elastic.reporting.background_calls import BackgroundCalls
from swift.elastic.reporting.display import Display, goodput_table
from swift.elastic.reporting.event_texts import reshard_text
from swift.elastic.reporting.journal import Journal
from swift.elastic.reporting.reporter import Reporter

__all__ = ["BackgroundCalls", "Display", "Journal", "Reporter", "goodput_table", "reshard_text"]
