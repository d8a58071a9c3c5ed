"""What the logs say: tables, statistics, figures and the report. Never imports torch."""
