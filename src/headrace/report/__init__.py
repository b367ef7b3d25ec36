"""Reads a run afterwards or while it goes on: its samples, their transcripts, and one HTML page."""
