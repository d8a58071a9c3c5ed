"""What the logs say: tables, statistics, figures and the report. Never imports torch."""

from mlhpc.suite.files import set_missing_home

set_missing_home()  # before Altair is imported
