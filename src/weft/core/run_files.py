"""The names of the files in a run folder that more than one package knows. docs/metrics.md and
docs/report.md say what is in them. No torch."""

from __future__ import annotations

RUN_FILE = "run.toml"
PLAN = "plan.txt"
METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"  # starts, restarts, warnings, the end
TRACEBACK = "traceback.txt"  # of the user's code, where that ended the run
RANKS = "ranks.json"  # what each rank holds and sends
PREDICTION = "prediction.json"
VERIFIED = "verify.json"
TRACE = "trace.json"
PROFILE = "profile.json"
