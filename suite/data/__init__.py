"""Builds and finds data sets, orders samples over ranks, and stages files to node-local storage."""

import os

# What sites' modules set for other programs: HDF5 without that plug-in or driver ends Python by a signal when h5py is
# imported. Shards are plain files, which HDF5's own connector and driver read.
for _name in ("HDF5_VOL_CONNECTOR", "HDF5_DRIVER"):
    os.environ.pop(_name, None)
