"""The event log and what is read from it: events, the record of a run, its score, the files of a run and of a results
tree.
"""
