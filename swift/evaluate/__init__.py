"""Evaluation: questions with known answers, and what models make of them, in numbers that have intervals.

``tasks`` defines the questions and reads them from files. ``scoring`` puts them to an engine, and ``harness`` lets
lm-eval do so. ``results`` holds what models answered, compares them, and keeps that in files.
"""
