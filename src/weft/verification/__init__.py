"""`weft verify`: proof that a layout computes what one device computes.

Open `verify_model.py` first, then `compare.py`. The package is not called `verify` because
`weft.verify` is the function.
"""

from weft.core import attach_face

__getattr__, __dir__, __all__ = attach_face(__name__, __file__)
