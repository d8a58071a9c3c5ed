"""Makes the JPEG form of image data: stored twice as large by one encoder, then decoded and resized to the model's size.

Training uses `REFERENCE`; the deployment may decode and resize by other libraries. It needs the extra
`mlhpc[numerics]`.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mlhpc.suite.errors import InputError

if TYPE_CHECKING:
    from mlhpc.suite.workload import Batch


Image = NDArray[np.uint8]
LARGER = 2  # times the model's side
QUALITY = 90
REFERENCE = ("pillow", "pillow bilinear")
FILTERS = (
    *("pillow nearest", "pillow box", "pillow hamming", "pillow bicubic", "pillow lanczos"),
    *("opencv nearest", "opencv linear", "opencv area", "opencv cubic", "opencv lanczos4"),
)


def encode(image: Image, quality: int = QUALITY) -> bytes:
    """Encode a grey image, enlarged, as JPEG."""
    from PIL import Image as Pillow

    file = io.BytesIO()
    large = Pillow.fromarray(image).resize([LARGER * side for side in image.shape[::-1]], Pillow.Resampling.BICUBIC)
    large.save(file, "JPEG", quality=quality)
    return file.getvalue()


def decode(content: bytes, decoder: str) -> Image:
    """Decode a grey JPEG image."""
    data: Any
    if decoder == "pillow":
        from PIL import Image as Pillow

        data = Pillow.open(io.BytesIO(content))
    elif decoder == "opencv":
        import cv2

        data = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_GRAYSCALE)
    else:
        import simplejpeg

        fast = decoder.endswith("fast")
        data = simplejpeg.decode_jpeg(content, "GRAY", fastdct=fast, fastupsample=fast)[:, :, 0]
    return np.asarray(data)


def resize(image: Image, side: int, name: str) -> Image:
    """Resize an image to a square by a filter of a library."""
    library, _, kind = name.partition(" ")
    if library == "pillow":
        from PIL import Image as Pillow

        return np.asarray(Pillow.fromarray(image).resize((side, side), Pillow.Resampling[kind.upper()]))
    import cv2

    return np.asarray(cv2.resize(image, (side, side), interpolation=getattr(cv2, f"INTER_{kind.upper()}")))


def convert(batch: Batch, *, quality: int = QUALITY, decoder: str = REFERENCE[0], filter_: str = REFERENCE[1]) -> Batch:
    """Convert the images of a batch to what the model sees of their JPEG form."""

    def change(images: Tensor) -> Tensor:
        side = images.shape[-1]
        each = [resize(decode(encode(image, quality), decoder), side, filter_) for image in images.numpy()]
        return torch.from_numpy(np.stack(each))

    return {name: change(value) if name == "image" else value for name, value in batch.items()}


def list_forms() -> Iterator[tuple[str, str, Callable[[Batch], Batch]]]:
    """List changes with other decoders, filters and qualities: name, kind, form. InputError names a missing library."""
    try:
        import cv2  # noqa: F401
        import simplejpeg  # noqa: F401
        from PIL import Image as Pillow  # noqa: F401
    except ImportError as error:
        raise InputError(f"--jpeg: {error.name} is not installed (pip install 'mlhpc[numerics]')") from None
    for decoder in ("opencv", "simplejpeg", "simplejpeg fast"):
        yield f"decoded by {decoder}", "decoder", partial(convert, decoder=decoder)
    for filter_ in FILTERS:
        yield f"resized by {filter_}", "resize", partial(convert, filter_=filter_)
    for quality in (50, 75, 95):
        yield f"quality {quality}", "quality", partial(convert, quality=quality)
