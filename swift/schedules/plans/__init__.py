"""Plans prepared before a failure.

``normalize`` reduces problems to failure counts, chooses which roles stay empty, and records who holds which blocks.
``store`` keeps plans on disk and describes a schedule as a JSON document.
"""
