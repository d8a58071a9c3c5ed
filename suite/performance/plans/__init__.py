"""What a parallel plan costs, before anything runs."""
