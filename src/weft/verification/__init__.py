"""`weft verify`: proof that a layout computes what one device computes."""

from .case import Case
from .report import Report
from .prove import verify, verify_case

__all__ = ["Case", "Report", "verify", "verify_case"]
