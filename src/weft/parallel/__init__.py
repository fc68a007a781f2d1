"""From a model and a layout to a Plan, and from a Plan to a sharded model. One file per axis in
`strategies/`.

Open `strategies/data.py` first, then `make_plan.py` and `apply.py`.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
