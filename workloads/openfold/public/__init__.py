"""The public data as centres have them: the PDB with OpenProteinSet's alignments, original or preprocessed."""
