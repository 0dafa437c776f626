"""Plans that are ready before a failure.

``normalize`` reduces problems to failure counts, ``normalize`` chooses which roles stay empty, ``normalize`` says who
holds what, ``store`` keeps plans on disk, and ``store`` describes a schedule as a JSON document.
"""
