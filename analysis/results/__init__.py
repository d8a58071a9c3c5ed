"""From runs to results: which runs are scored, where their time went, how many epochs the reference needs."""
