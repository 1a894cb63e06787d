"""Decides which request runs where and when. The one authority on requests and blocks."""
