"""Evaluation: questions with known answers, and what models make of them, in numbers that have intervals.

``tasks`` are the questions and ``task_files`` reads them; ``intervals`` are those of shares and of their differences;
``results`` holds what models answered, and ``documents`` keeps that in files. ``asking`` puts the questions to an
engine, and ``harness`` lets lm-eval do so.
"""
