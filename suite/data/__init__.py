"""Data sets: sharded files, their order over ranks, staging to node-local storage, building and finding them."""
