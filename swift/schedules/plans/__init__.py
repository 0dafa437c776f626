"""Plans prepared before a failure.

``normalize`` reduces problems to failure counts, chooses which roles stay empty, and records which worker holds which
chunks. ``store`` keeps plans on disk and describes a schedule as a JSON document.
"""
