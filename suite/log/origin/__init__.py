"""Records what a run is made of: the code and the installed distributions."""
