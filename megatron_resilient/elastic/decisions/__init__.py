"""What the coordinator decides, one question a file; `elastic/membership.py` asks them in order."""
