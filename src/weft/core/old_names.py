"""Old names of options, axes and keys of a run file -> the names that replaced them.

`errors.nearest` and the command line read this table: who writes an old name gets an error that
names the new one.
"""

from __future__ import annotations

RENAMED = {"--wide": "--exhaustive", "up": "ulysses"}
