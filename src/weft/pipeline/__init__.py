"""Pipelines before they run: schedules, their simulation and drawing, and how a model is split into
stages.

Open `schedules/one_f_one_b.py` first, then `simulator.py` and `split_model.py`.
"""

from weft.core import attach_face

__getattr__, __dir__, __all__ = attach_face(__name__, __file__)
