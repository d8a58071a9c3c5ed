"""Data sets: building and finding them, their files, the order of samples over ranks, staging to node-local storage."""
