"""What runs inside a user's model: losses, attention masks, dropout, batch norm, expert routing,
and weft's own models.

Open `module_roles.py` first: it finds which modules of a model can be sharded.
"""

from weft.core import attach_face

__getattr__, __dir__, __all__ = attach_face(__name__, __file__)
