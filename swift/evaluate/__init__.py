"""Evaluation: asks models questions with known answers, and reports scores with confidence intervals.

``tasks`` defines the questions and reads them from files. ``scoring`` answers them with a generation engine.
``harness`` lets lm-eval use such an engine. ``results`` holds the answers of models, compares models, and stores
answers and comparisons in files.
"""
