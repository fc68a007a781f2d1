"""Starting the processes of a run, or joining those that a launcher has started; and `weft doctor`.

Open `local_workers.py` first.
"""

from weft.core import attach_face

__getattr__, __dir__, __all__ = attach_face(__name__, __file__)
