"""The public data as centres have them: the Protein Data Bank with OpenProteinSet's alignments, original or preprocessed."""
