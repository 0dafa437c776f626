"""Evaluation: questions with known answers, and what models make of them, in numbers that have intervals.

``tasks`` are the questions and ``tasks`` reads them; ``results`` are those of shares and of their differences;
``results`` holds what models answered, and ``results`` keeps that in files. ``scoring`` puts the questions to an
engine, and ``harness`` lets lm-eval do so.
"""
