"""Files that the checker exchanges with other tools and people: JSON, figures of merit, waivers, reference points."""
