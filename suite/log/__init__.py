"""Reads and writes the event log: events, the record of a run, its score, the files of a run and of a results tree."""
