"""Seeded cases of what a user can get wrong: a small world on disk, a few mutations, one command or call."""
