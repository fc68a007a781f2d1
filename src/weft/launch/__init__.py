"""Starting the processes of a run, or joining those that a launcher has started; and `weft doctor`.

Open `local_workers.py` first.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
