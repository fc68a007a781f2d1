"""What a run would cost on a cluster, and which layout to choose: cost model, search, simulation,
calibration.

Open `cost/estimate.py` first, then `search/ranking.py`.
"""

from weft.core import attach_face

__getattr__, __dir__, __all__ = attach_face(__name__, __file__)
