"""State dicts in folders: written aside, moved into place whole, verified, read without running code."""
