"""A run, a plan or a simulation as one HTML file that needs no network.

`read_run.py` reads a run folder into data, `run_page.py` makes sections of it, also as data, and
`write_html.py` writes the file. Open `run_page.py` first.
"""

from weft.core import attach_face

__getattr__, __dir__, __all__ = attach_face(__name__, __file__)
