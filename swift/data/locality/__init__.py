"""Locality: documents by domain, and an order of windows anywhere between random and by domain."""

from swift.data.locality.domains import DomainRuns, RunsBuilder, domain_of
from swift.data.locality.order import STRETCH_BATCHES, LocalOrder, arranged
from swift.data.locality.shares import mixed_places

__all__ = ["STRETCH_BATCHES", "DomainRuns", "LocalOrder", "RunsBuilder", "arranged", "domain_of", "mixed_places"]
