"""What the checker exchanges with other tools and people: JSON, SARIF, waivers, reference points from a file."""
