"""How replicas stay together: one file per synchroniser, and one per gradient codec in `codecs/`.
Data only.

Open `allreduce.py` first, then `local_sgd.py`.
"""

from weft.core import attach_face

__getattr__, __dir__, __all__ = attach_face(__name__, __file__)
