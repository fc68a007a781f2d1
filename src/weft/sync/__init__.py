"""How replicas stay together: one file per synchroniser, and one per gradient codec in `codecs/`.
Data only.

Open `allreduce.py` first, then `local_sgd.py`.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
