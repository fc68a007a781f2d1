"""The command line: one file per verb, which parses options, calls one function and prints.

Open `app.py` first.
"""

from weft.core import attach_face

__getattr__, __dir__, __all__ = attach_face(__name__, __file__)
