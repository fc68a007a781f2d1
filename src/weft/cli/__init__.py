"""The command line: one file per verb, which parses options, calls one function and prints.

Open `app.py` first.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
