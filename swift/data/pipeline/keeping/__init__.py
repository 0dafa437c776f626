"""Surveys that outlive a process: what stays of a source, and its samples, in files named by a digest."""
