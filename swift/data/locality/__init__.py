"""Locality: documents by domain, and an order of windows anywhere between random and by domain."""
