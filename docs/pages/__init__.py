"""The pages of the site that are made from the code. `make docs` builds them; none is committed.

mkdocs calls `on_files` (mkdocs.yml, ``hooks``). A page is a function that returns its text, so that a test can read it too.
"""
