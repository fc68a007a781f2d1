"""`weft train` in every rank: the run file's objects, the loop, and the run folder.

Open `build.py` first, then `trainer.py` and `train_loop.py`.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
