"""Pipelines before they run: schedules, their simulation and drawing, and how a model is split into
stages.

Open `schedules/one_f_one_b.py` first, then `simulator.py` and `split_model.py`.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
