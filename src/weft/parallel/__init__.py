"""From a model and a layout to a Plan, and from a Plan to a sharded model. One file per axis in
`strategies/`.

Open `strategies/data.py` first, then `make_plan.py` and `apply.py`.
"""

from weft.core import attach_face

__getattr__, __dir__, __all__ = attach_face(__name__, __file__)
