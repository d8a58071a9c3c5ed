"""Draw the data of the example: noisy 16 x 16 images of squares, discs and crosses, as two NumPy files."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

SIDE, KINDS = 16, 3


def draw(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Images (count, 1, 16, 16) in float32 and their kinds (count,), 0 to 2, in int64."""
    rng = np.random.default_rng(seed)
    kinds = rng.integers(0, KINDS, count)
    centres, radii = rng.uniform(5, 10, (count, 2, 1, 1)), rng.uniform(3, 5, (count, 1, 1))
    y, x = np.mgrid[:SIDE, :SIDE]
    dy, dx = np.abs(y - centres[:, 0]), np.abs(x - centres[:, 1])
    square, disc = np.maximum(dy, dx) < 0.85 * radii, np.hypot(dy, dx) < radii
    cross = (np.minimum(dy, dx) < 1.2) & (np.maximum(dy, dx) < radii)
    shapes = np.choose(kinds[:, None, None], [square, disc, cross])
    images = shapes + rng.normal(0, 0.2, shapes.shape)
    return images[:, None].astype(np.float32), kinds.astype(np.int64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (name, count) in enumerate((("train", 1000), ("val", 300))):
        images, kinds = draw(count, seed)
        np.savez(folder / f"{name}.npz", images=images, kinds=kinds)


if __name__ == "__main__":
    main()
