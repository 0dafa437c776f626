"""Swift: mixture-of-experts training in JAX for unevenly loaded experts and failing machines.

A batch flows from ``swift.data`` through ``swift.models`` and ``swift.experts``, on a ``swift.mesh``; ``swift.train``
drives it. ``swift.schedules`` plans pipelines and depends on none of them. Each package's ``__init__`` lists its public
names. ``python -m swift --help`` lists the commands.
"""

from swift.errors import RunError, SettingError

__version__ = "0.1.0"
DISTRIBUTION = "swift-moe"
"""The distribution that this ``swift`` belongs to; other packages on PyPI install a top-level ``swift`` too."""

__all__ = ["RunError", "SettingError"]
