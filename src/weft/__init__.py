"""weft lays any PyTorch model over any devices, and proves that the numbers are right.

`Layout`, `Plan`, `plan`, `verify`, `Engine` and `launch` are what scripts use, beside `losses`,
`models`, `data`, `optimizers` and `checkpoint`; `__init__.pyi` lists all names. Each package beside
this file has a face of the same form: its docstring says what it is for and which file to open
first.
"""

from weft.core import attach_face

# Names are imported when they are first used: `weft --help` does not wait for torch.
__getattr__, __dir__, __all__ = attach_face(__name__, __file__)
