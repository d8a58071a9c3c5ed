"""What a report is made from: logs, and files of other kinds by one registry of readers."""
