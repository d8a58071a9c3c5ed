"""What the logs say: tables, statistics, figures and the report. Never imports torch."""

from suite.files import ensure_home

ensure_home()  # before Altair is imported
