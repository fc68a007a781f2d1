"""The nouns that every other package speaks: layouts, plans, schedules, shards, run files, errors.

Open `layout.py` first, then `plan.py`: the strategies write Steps, everything else reads them.
"""

from .faces import attach_face

__getattr__, __dir__, __all__ = attach_face(__name__, __file__)
