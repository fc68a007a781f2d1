"""`weft verify`: proof that a layout computes what one device computes."""

from .case import Case
from .prove import verify, verify_case
from .report import Report

__all__ = ["Case", "Report", "verify", "verify_case"]
