"""Two plans in one job: blocks of steps in turn, from one checkpoint and the same data, and what differs."""
