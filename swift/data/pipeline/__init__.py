"""Pipelines: samples of a source through operators, and the plan that runs them.

A pipeline says what the samples are; a plan says how they are made: in which order the operators run, what is kept, and
by how many threads and processes. The samples of a pipeline are the same for every plan.
"""
