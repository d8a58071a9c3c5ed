"""Run folders and cards, as tests of the analysis have them."""

from tests.analysis.conftest import cards as cards
from tests.analysis.conftest import run_folder as run_folder
