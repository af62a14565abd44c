"""The laboratory: the paper's studies and ours, which use the two packages as any user would.

Not in the wheel; run from a checkout, as ``python -m reproduction``.
"""
