"""Executes steps in stream order. Holds mirrors of what the scheduler owns, never the truth."""
