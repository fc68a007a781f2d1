"""Chains of linears that tensor parallel can cut, found along a forward."""
