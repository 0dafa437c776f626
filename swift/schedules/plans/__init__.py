"""Plans that are ready before a failure.

``normalize`` reduces problems to failure counts, ``moved_roles`` chooses which roles stay empty, ``holders`` says who
holds what, ``store`` keeps plans on disk, and ``json_format`` describes a schedule as a JSON document.
"""
