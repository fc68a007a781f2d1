"""`weft train` in every rank: the run file's objects, the loop, and the run folder.

Open `build.py` first, then `trainer.py` and `train_loop.py`.
"""

from weft.core import attach_face

__getattr__, __dir__, __all__ = attach_face(__name__, __file__)
