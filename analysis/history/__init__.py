"""The history of a machine: results over time in a folder, and where they changed."""
