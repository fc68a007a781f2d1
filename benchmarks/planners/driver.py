"""What the peers' drivers share: runs in, predictions out, each layout timed. Imports only the
standard library.

With a peer's own interpreter:  python drive_PEER.py CHECKOUT RUNS.json OUT.json LIMIT_S
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

Predict = Callable[
    [Any], tuple[float, float]
]  # a run -> seconds of a step, GiB of the fullest device
GIB = 2.0**30


class Cannot(Exception):
    """The peer has no way to say this run."""


def drive(make: Callable[[Path], Predict]) -> None:
    """Predict run by run, in their order, until all are done or the limit is reached; write what
    was found, and the core's seconds that it took, reading of the peer's own files aside."""
    checkout, runs, out, limit_s = (
        Path(sys.argv[1]),
        Path(sys.argv[2]),
        Path(sys.argv[3]),
        float(sys.argv[4]),
    )
    sys.path[0] = str(checkout)  # the peer's package, and not this folder
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    given = [SimpleNamespace(**run) for run in json.loads(runs.read_text())]
    found: dict[str, dict[str, Any]] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        predict = make(checkout)
        start = time.process_time()
        for run in given:
            try:
                step_s, peak_gib = predict(run)
                found[run.id] = {"step_s": step_s, "peak_gib": peak_gib}
            except Cannot as why:
                found[run.id] = {"cannot": str(why)}
            except Exception as why:
                found[run.id] = {"cannot": f"{type(why).__name__}: {why}"}
            if (took_s := time.process_time() - start) > limit_s:
                break
    out.write_text(json.dumps({"took_s": took_s, "runs": found}))


def only(run: Any, **wanted: Any) -> None:
    """Raises Cannot unless each field of `run` is among the values wanted."""
    for name, values in wanted.items():
        if getattr(run, name) not in values:
            raise Cannot(f"{name} {getattr(run, name)}")
