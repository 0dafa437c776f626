"""The settings of a run.

The experiment, its list of failures, and the configuration that is stored beside a run.
"""
