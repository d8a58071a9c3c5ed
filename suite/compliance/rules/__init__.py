"""The rules: functions that yield what is wrong with a log, the runs of a result, or a package."""
