"""The studies of the paper and our own, which use the two packages like any user.

They are not in the wheel; run them from a checkout by ``python -m reproduction``.
"""
