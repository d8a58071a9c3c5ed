"""Builds and finds data sets, orders samples over ranks, and stages files to node-local storage."""
