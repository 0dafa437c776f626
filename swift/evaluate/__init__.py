"""Evaluation: asks models questions with known answers, and reports scores with confidence intervals.

``tasks`` defines the questions and reads them from files. ``scoring`` puts them to a generation engine, and ``harness``
lets lm-eval do so. ``results`` holds the answers of models, compares models, and stores both in files.
"""
