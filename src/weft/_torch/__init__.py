"""Every private API of torch that weft uses: one file per topic, one small function per trick.

A function says what it does and which public API would replace it. `tests/_torch` has a test for
each, which fails when a new torch changes what the trick relies on. Other packages import the
functions from the files directly: this package has no face. Open `modules.py` first.
"""
