"""The command ``data``: the profile of a pipeline, the plan that is chosen for it, and how fast both are."""
