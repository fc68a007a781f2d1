"""`weft verify`: proof that a layout computes what one device computes.

Open `verify_model.py` first, then `compare.py`. The package is not called `verify` because
`weft.verify` is the function.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
